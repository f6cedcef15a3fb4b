"""What TRL's tests take from the hub, made by scripts of its checkout; and the pytest plugin (``-p trl_hub``) that finds it.

``python trl_hub.py CHECKOUT FOLDER`` makes tiny models and data sets. FOLDER is then ``HF_HOME``. Of the hub, the scripts
need tokenizers (here one of bytes, with TRL's copy of the model's chat template) and default configurations. Models that
need a processor of images are left out: their tests fail, with and without offloading.
"""

import contextlib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest

COMMIT = "0" * 40


def pytest_configure(config: pytest.Config) -> None:
    load, made = datasets.load_dataset, Path(os.environ["HF_HOME"]) / "saved"

    def load_dataset(path: str, name: str | None = None, *args: Any, split: str | None = None, **options: Any) -> Any:
        if not (made / path / str(name)).is_dir():
            return load(path, name, *args, split=split, **options)
        found = datasets.load_from_disk(str(made / path / str(name)))
        return found[split] if split else found

    datasets.load_dataset = load_dataset


def make(checkout: Path, folder: Path) -> None:
    """The models, in a cache of the hub, and the data sets."""

    def save(found: datasets.DatasetDict, repository: str, config_name: str) -> None:
        found.save_to_disk(str(folder / "saved" / repository / config_name))

    sys.path.insert(0, str(checkout))
    with mock.patch.object(datasets.DatasetDict, "push_to_hub", save):
        for name in ("zen", "toolcall", "harmony"):
            importlib.import_module(f"scripts.generate_{name}_dataset").main(0.1, True, f"trl-internal-testing/{name}")
    for kind in ("for_causal_lm", "for_sequence_classification"):
        for script in sorted((checkout / "scripts/generate_tiny_models" / kind).glob("[!_]*.py")):
            with contextlib.suppress(Exception):
                _make_model(f"scripts.generate_tiny_models.{kind}.{script.stem}", checkout, folder / "hub")


def _make_model(script: str, checkout: Path, hub: Path) -> None:
    import transformers
    from scripts.generate_tiny_models import _common

    made: list[Any] = []
    kind = script.rpartition(".")[2].partition("_for_")[0]

    def tokenizer(name: str, **_: Any) -> Any:
        made.append(_tokenizer(name, checkout))
        return made[-1]

    def generation_config(*_: Any, **__: Any) -> Any:
        return transformers.GenerationConfig(eos_token_id=made[-1].eos_token_id, pad_token_id=made[-1].pad_token_id)

    def config(*_: Any, **settings: Any) -> Any:
        return transformers.AutoConfig.for_model(kind, vocab_size=len(made[-1]), **settings)

    def push(model: Any, tokenizer: Any, generation_config: Any, prefix: str, suffix: str | None = None) -> None:
        name = "-".join(filter(None, [prefix, type(model).__name__, suffix]))
        repository = hub / f"models--trl-internal-testing--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text(COMMIT)
        for part in (model, tokenizer, generation_config):
            part.save_pretrained(repository / "snapshots" / COMMIT)

    unused = {name: mock.DEFAULT for name in dir(_common) if re.match("check_|print_|smoke_", name)}
    with (
        mock.patch.multiple(_common, push_to_hub=push, **unused),
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", tokenizer),
        mock.patch.object(transformers.GenerationConfig, "from_pretrained", generation_config),
        mock.patch.object(transformers.AutoConfig, "from_pretrained", config),
    ):
        transformers.set_seed(0)
        importlib.import_module(script)


def _tokenizer(name: str, checkout: Path) -> Any:
    """One of bytes, with the chat template of the model ``name`` and the special tokens in it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def plain(text: str) -> str:
        return re.sub("[^a-z0-9]", "", text.lower())

    templates = {plain(path.stem): path for path in (checkout / "trl/chat_templates").glob("*.jinja")}
    fitting = [key for key in templates if plain(name.rpartition("/")[2]).startswith(key)]
    template = templates[max(fitting, key=len, default="qwen25")].read_text()
    special = sorted(set(re.findall(r"<\|?\w+\|?>", template)) | {"<|endoftext|>"})
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    end = next((one for one in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>") if one in special), "<|endoftext|>")
    tokens = {"additional_special_tokens": special, "eos_token": end, "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **tokens)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
