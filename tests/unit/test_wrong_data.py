"""Files that are no training data: an error that says which file or column, before the first step or instead of a result."""

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset

from hf_offload import OffloadConfigError
from hf_offload.settings.recipes import DataRecipe, load_recipe
from hf_offload.training.data import load_parts
from hf_offload.training.run import run_recipe
from hf_offload.training.tasks.pairs import _encode as encode_pairs
from hf_offload.training.tasks.task import map_rows, texts_of


def lines(*rows):
    return lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(column):
    return lambda path: parquet.write_table(pa.table({"text": column}), path)


def raw(content):
    return lambda path: path.write_bytes(content)


def not_utf8(rows=60):
    """Text that Arrow takes as it is: only the last row is not UTF-8."""
    raw_bytes = pa.array([b"some text"] * (rows - 1) + [b"\xff\xfe"], pa.binary())
    return pa.Array.from_buffers(pa.string(), rows, raw_bytes.buffers())


WRONG = [
    ("utf16.txt", raw("some text\n".encode("utf-16")), "is not UTF-8 text"),
    ("utf16le.txt", raw("some text\n".encode("utf-16-le")), "holds NUL characters"),
    ("latin1.txt", raw("caf\u00e9\n".encode("latin-1")), "is not UTF-8 text"),
    ("program.txt", raw(b"\x7fELF\x02\x01\x01\x00\xff\xfe"), "is not UTF-8 text"),
    ("cut_off.txt", raw("caf\u00e9".encode()[:-1]), "is not UTF-8 text"),
    ("utf16.csv", raw("text\nsome\n".encode("utf-16")), "is not UTF-8 text"),
    ("utf16.jsonl", raw('{"text": "a"}\n'.encode("utf-16")), "is not UTF-8 text"),
    ("empty.jsonl", raw(b""), "empty.jsonl|rows|cannot be read"),
    ("blank.jsonl", raw(b"\n\n"), "rows|cannot be read"),
    ("empty.csv", raw(b""), "rows|cannot be read"),
    ("header.csv", raw(b"text\n"), "no rows|cannot be read"),
    ("empty.parquet", raw(b""), "cannot be read"),
    ("no_table.parquet", raw(b"some text"), "cannot be read"),
    ("without_rows.parquet", table(pa.array([], pa.string())), "no rows"),
    ("numbers.jsonl", lines({"text": 1}, {"text": 2}), "'text' of the data holds values of type int64: text is needed"),
    ("mappings.jsonl", lines({"text": {"a": 1}}), "'text' of the data holds"),
    ("lists.jsonl", lines({"text": ["a"]}), "'text' of the data holds"),
    ("nulls.jsonl", lines({"text": None}), "'text' of the data holds nothing"),
    ("mixed.jsonl", lines({"text": "a"}, {"text": 2}), "'text' of the data holds|cannot be read"),
    ("bytes.parquet", table(pa.array([b"a", b"b"])), "'text' of the data holds values of type binary"),
    ("dates.parquet", table(pa.array([0], pa.date32())), "'text' of the data holds values of type date32"),
    ("list.json", raw(b"[1, 2"), "cannot be read"),
    ("numbers.csv", raw(b"text\n1\n2\n"), "'text' of the data holds"),
]


def test_a_data_set_in_arrows_own_format_with_text_that_is_none(tmp_path):
    """Arrow does not look at it, and the hub's files are not ours to look at."""
    rows = Dataset(pa.table({"text": not_utf8()}))
    with pytest.raises(OffloadConfigError, match=r"Text of the training data cannot be read: it is not UTF-8"):
        map_rows(rows, lambda batch, where: {"text": texts_of(batch, "text", where)}, where="the training data")


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "streaming"])
@pytest.mark.parametrize(("name", "write", "part"), WRONG, ids=[name for name, _, _ in WRONG])
def test_what_is_no_training_data_is_refused(tmp_path, name, write, part, streaming):
    write(tmp_path / name)
    data = DataRecipe(files=str(tmp_path / name), tokenizer={"train_bpe": 280}, sequence_length=8, streaming=streaming)
    with pytest.raises(OffloadConfigError) as refused:
        rows, _ = load_parts(data, data.columns(), tmp_path / "cache")
        for row in rows.map(lambda batch: {"text": texts_of(batch, "text", "the data")}, batched=True):
            assert isinstance(row["text"], str)
        raise AssertionError("it was read")
    assert any(word in str(refused.value) for word in part.split("|")), str(refused.value)
    assert len(str(refused.value)) < 600


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfsome text")
    data = DataRecipe(files=str(tmp_path / "a.txt"), tokenizer={"train_bpe": 280})
    rows, _ = load_parts(data, data.columns(), tmp_path / "cache")
    assert "some text" in rows[0]["text"]


@pytest.mark.parametrize("value", [3, {"a": 1}, b"x", ["a"]])
def test_every_task_refuses_what_a_stream_brings_later(value):
    with pytest.raises(OffloadConfigError, match=r"The column 'text' of the training data holds .*: text is needed"):
        texts_of({"text": ["a", None, value]}, "text", "the training data")
    with pytest.raises(OffloadConfigError, match=r"'target' of data.validation"):
        encode_pairs({"source": ["a"], "target": [value]}, None, "source", "target", "", 8, 8, "data.validation")


@pytest.mark.parametrize("text", ["", None], ids=["empty", "null"])
def test_a_stream_without_text_is_not_reported_as_a_training(tiny_recipe, tmp_path, text):
    lines({"text": "some text"}, *[{"text": text}] * 20)(tmp_path / "data.jsonl")
    recipe = load_recipe(tiny_recipe, ["data.files=[data.jsonl]", "data.streaming=true"])
    with pytest.raises(OffloadConfigError, match="No row can be made of the training data: is every text of it empty"):
        run_recipe(recipe)
    assert not (tmp_path / "out" / "config.json").exists()
