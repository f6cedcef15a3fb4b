"""Tokenizers and models whose files are damaged: a configuration error that names the folder, or they load as before."""

import shutil

import pytest
import transformers

from hf_offload import OffloadConfig, OffloadConfigError
from hf_offload.settings.recipes import DataRecipe, ModelRecipe, Recipe
from hf_offload.training.model import END_OF_TEXT, build_model, build_tokenizer

CONTENTS = [None, b"", b"{", b"{}", b"[]", b"3", b'"a"', b"null", b"\xff\xfe", b"half"]


def refusal_of(make, *arguments):
    """What is said when it cannot be made, or None."""
    try:
        make(*arguments)
    except OffloadConfigError as error:
        return str(error)
    return None


@pytest.fixture
def trained(tmp_path):
    """The data that a tokenizer was trained on, and the folder it is kept in."""
    (tmp_path / "text.txt").write_text("some text and more of it\n" * 20)
    data = DataRecipe(files=str(tmp_path / "text.txt"), tokenizer={"train_bpe": 280})
    build_tokenizer(data, None, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").glob("tokenizer-*")
    return data, kept


def damages(folder):
    """The folder with one of its files missing or holding something else, for all of them; as it was at the end."""
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for content in CONTENTS:
            path.unlink()
            if content is not None:
                path.write_bytes(good[: len(good) // 2] if content == b"half" else content)
            yield path.name, content
            path.write_bytes(good)


def test_a_damaged_trained_tokenizer_is_refused_with_what_to_do(trained, tmp_path):
    data, kept = trained
    refused = 0
    for name, content in damages(kept):
        said = refusal_of(build_tokenizer, data, None, tmp_path / "cache")
        if said is None:
            assert build_tokenizer(data, None, tmp_path / "cache").eos_token == END_OF_TEXT, (name, content)
        else:
            assert f"data.tokenizer: '{kept}' cannot be loaded: " in said
            assert said.endswith(" Remove it: the tokenizer is trained again.")
            refused += 1
    assert refused >= 2 * len(CONTENTS) - 4  # an empty mapping may stand for defaults


@pytest.mark.parametrize("what", ["an empty folder", "a file"])
def test_what_is_no_trained_tokenizer_is_refused(trained, tmp_path, what):
    data, kept = trained
    shutil.rmtree(kept)
    kept.mkdir() if what == "an empty folder" else kept.touch()
    with pytest.raises(OffloadConfigError, match="Remove it: the tokenizer is trained again"):
        build_tokenizer(data, None, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").glob("tokenizer-*")] == [kept.name]


def test_a_damaged_model_is_refused(trained, tmp_path):
    """With the tokenizer that lies beside its weights."""
    data, kept = trained
    folder = tmp_path / "model"
    config = transformers.AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, n_positions=16, vocab_size=280)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    data = DataRecipe(files=data.files, sequence_length=8)
    recipe = Recipe(
        name="r", model=ModelRecipe(name=str(folder)), data=data, training={}, offload=OffloadConfig(tier="none")
    )
    refused = set()
    for name, content in damages(folder):
        said = refusal_of(lambda: build_model(recipe, build_tokenizer(data, str(folder), tmp_path)))
        if said is not None:
            assert len(said) < 1000
            assert f"{str(folder)!r} cannot be loaded: " in said or "The tokenizer has" in said, (name, content)
            refused.add(name)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= refused
