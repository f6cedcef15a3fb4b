import csv
import json
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import GatedRepoError

from hf_offload import OffloadConfig, OffloadConfigError
from hf_offload.settings.recipes import DataRecipe, ModelRecipe, Recipe
from hf_offload.training.data import load_parts, stdlib_files
from hf_offload.training.model import END_OF_TEXT, build_model, build_tokenizer
from hf_offload.training.prepare import RandomTokens
from hf_offload.training.tasks.task import Setup
from hf_offload.training.tasks.text import collate, make_blocks

TEXTS = [f"document {i} says: " + "saved tensors go to disk and come back exact. " * (i + 1) for i in range(12)]
BPE = {"train_bpe": 280}


def text_files(folder):
    paths = []
    for i, text in enumerate(TEXTS):
        paths.append(folder / f"{i:02}.txt")
        paths[-1].write_text(text)
    return str(folder / "*.txt")


def json_lines(folder):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"body": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)))
    return str(path)


def csv_table(folder):
    path = folder / "data.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "body"])
        writer.writerows(enumerate(TEXTS))
    return str(path)


def ids_of(data, tmp_path):
    tokenizer = build_tokenizer(data, None, tmp_path / "cache")
    rows, _ = load_parts(data, data.columns(), tmp_path / "cache")
    blocks = make_blocks(rows, Setup(data=data, tokenizer=tokenizer), "the training data")
    return [row["input_ids"] for row in blocks], tokenizer


@pytest.mark.parametrize(
    ("make", "column", "streaming"),
    [(text_files, "text", False), (text_files, "text", True), (json_lines, "body", True), (csv_table, "body", False)],
    ids=["text", "text, streamed", "jsonl, streamed", "csv"],
)
def test_every_source_becomes_the_same_blocks(tmp_path, make, column, streaming):
    data = DataRecipe(files=make(tmp_path), text_column=column, streaming=streaming, sequence_length=16, tokenizer=BPE)
    blocks, tokenizer = ids_of(data, tmp_path)
    # Nothing lost but the rest that fills no block, nothing padded, and the documents are in order.
    expected = [i for text in TEXTS for i in [*tokenizer.encode(text), tokenizer.eos_token_id]]
    assert [i for block in blocks for i in block] == expected[: len(expected) // 16 * 16]
    assert {len(block) for block in blocks} == {16}
    assert tokenizer.decode(expected) == END_OF_TEXT.join([*TEXTS, ""])


def test_the_tokenizer_is_trained_once_and_again_when_the_data_changes(tmp_path, monkeypatch):
    files = text_files(tmp_path)
    data = DataRecipe(files=files, sequence_length=16, tokenizer=BPE)
    first = build_tokenizer(data, None, tmp_path / "cache").get_vocab()
    assert len(first) == 280
    assert len(list((tmp_path / "cache").glob("tokenizer-*"))) == 1

    with monkeypatch.context() as patch:
        patch.setattr("hf_offload.training.model._train_bpe", lambda *_: pytest.fail("trained again"))
        assert build_tokenizer(data, None, tmp_path / "cache").get_vocab() == first
    assert build_tokenizer(data, None, tmp_path / "other cache").get_vocab() == first

    (tmp_path / "00.txt").write_text("zebras " * 500)
    assert build_tokenizer(data, None, tmp_path / "cache").get_vocab() != first


def test_the_tokenizer_does_not_know_the_rows_that_are_held_back(tmp_path):
    lines = [json.dumps({"text": f"{chr(97 + i) * 9} " * (20 - i)}) for i in range(20)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))

    def vocabulary(**settings):
        data = DataRecipe(files=str(tmp_path / "words.jsonl"), tokenizer=BPE, **settings)
        return build_tokenizer(data, None, tmp_path / "cache").get_vocab()

    everything = vocabulary()
    assert vocabulary(validation=0.5) != everything
    assert vocabulary() == everything


def test_the_standard_library_is_read_in_order_and_up_to_a_size():
    files = stdlib_files(300_000)
    sizes = [path.stat().st_size for path in files]
    assert sum(sizes) >= 300_000 > sum(sizes[:-1])
    assert files == stdlib_files(300_000)
    everything = stdlib_files()
    assert everything[: len(files)] == files
    assert not [path for path in everything if {"test", "tests", "site-packages"} & set(path.parts[-4:-1])]


def test_the_standard_library_loads(tmp_path):
    data = DataRecipe(source="python-stdlib", max_bytes="50KB", sequence_length=32, tokenizer=BPE)
    blocks, _ = ids_of(data, tmp_path)
    assert len(blocks) > 100


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_column_is_named_with_those_there_are(tmp_path, streaming):
    data = DataRecipe(files=json_lines(tmp_path), streaming=streaming, sequence_length=16, tokenizer=BPE)
    with pytest.raises(OffloadConfigError, match=r"The column 'text' is not in the data. It has: body, id"):
        load_parts(data, data.columns(), tmp_path / "cache")


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ("none*.txt", "there is no file 'none"),
        (["a.txt", "b.csv"], "mixes csv and text"),
        ("c.bin", "of no known kind"),
        ("broken.jsonl", "cannot be read as json"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, monkeypatch, files, part):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.csv", "c.bin"):
        (tmp_path / name).write_text("x,y\n1,2\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(OffloadConfigError, match=part):
        load_parts(DataRecipe(files=files, tokenizer=BPE), ("text",), tmp_path / "cache")


def test_too_little_data_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("a few words")
    data = DataRecipe(files=str(tmp_path / "short.txt"), sequence_length=500, tokenizer=BPE)
    with pytest.raises(OffloadConfigError, match="shorter than one block of 500 tokens"):
        ids_of(data, tmp_path)


def refuse(*_, **__):
    """What the hub answers about something gated."""
    response = SimpleNamespace(status_code=403, headers={}, request=None)  # of whichever client the hub's library has
    raise GatedRepoError(
        "403 Client Error.\n\nAccess to owner/closed is restricted. Visit it to ask.", response=response
    )


MODEL = Recipe(
    name="r",
    model=ModelRecipe(name="owner/closed"),
    data=DataRecipe(files="a.txt"),
    training={},
    offload=OffloadConfig(tier="none"),
)
LOADERS = {
    "model": lambda cache: build_model(MODEL, None),
    "tokenizer": lambda cache: build_tokenizer(MODEL.data, "owner/closed", cache),
    "data": lambda cache: load_parts(DataRecipe(hub="owner/closed"), (), cache),
}


@pytest.mark.parametrize("access", ["gated", "out of reach"])
@pytest.mark.parametrize("what", LOADERS)
def test_what_the_hub_does_not_give_is_told_with_how_to_do_without_it(what, access, tmp_path, monkeypatch):
    if access == "gated":
        monkeypatch.setattr("transformers.utils.hub.hf_hub_download", refuse)
        monkeypatch.setattr("datasets.load._raise_if_offline_mode_is_enabled", refuse)
    with pytest.raises(OffloadConfigError) as caught:
        LOADERS[what](tmp_path)
    message = str(caught.value)
    assert "'owner/closed' cannot be loaded: " in message
    assert ("gated" in message.partition(" Is the name right?")[0]) == (access == "gated")
    for part in ("`hf auth login`", "download it elsewhere with `hf download`, and give the folder here"):
        assert part in message


def test_a_data_set_that_is_a_program_is_told_with_what_to_take_instead(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "set.py").write_text("")
    with pytest.raises(OffloadConfigError, match=r"no longer supported.*take one whose rows are Parquet.*data\.files"):
        load_parts(DataRecipe(hub=str(tmp_path / "set")), (), tmp_path / "cache")


def test_a_batch_has_labels_of_its_own():
    batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}])
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (2, 3)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_random_tokens_depend_on_the_seed_and_the_row_alone():
    data = RandomTokens(8, 64, 50, seed=7, task="causal-lm")
    rows = [data[i]["input_ids"] for i in range(8)]
    assert len(data) == 8
    assert all(torch.equal(data[i]["input_ids"], rows[i]) for i in reversed(range(8)))
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(RandomTokens(8, 64, 50, seed=8, task="causal-lm")[0]["input_ids"], rows[0])
    assert set(torch.cat(rows).tolist()) == set(range(50))


def test_labels_of_random_tokens_fit_the_task():
    causal, masked, seq2seq = (
        collate([RandomTokens(2, 200, 50, seed=7, task=task)[i] for i in range(2)])
        for task in ("causal-lm", "masked-lm", "seq2seq-lm")
    )
    for batch in (causal, masked, seq2seq):
        assert batch["input_ids"].shape == batch["labels"].shape == (2, 200)
    assert torch.equal(causal["labels"], causal["input_ids"])
    kept = masked["labels"] != -100
    assert kept.sum(dim=1).tolist() == [30, 30]
    assert torch.equal(masked["labels"][kept], masked["input_ids"][kept])
    assert not torch.equal(seq2seq["labels"], seq2seq["input_ids"])
    assert (RandomTokens(1, 2, 50, seed=7, task="masked-lm")[0]["labels"] != -100).sum() == 1
