"""Which output heads transformers has, and which of them a tiled loss serves: ``python docs/make_tiled_heads.py FILE.md``.

Every language model of the three kinds is built from its own configuration, made small. A head is served if a training step
with it gives the loss and the gradients of a step without.
"""

import copy
import logging
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from rich.progress import track
from transformers.models.auto import modeling_auto

from hf_offload import OffloadConfig, OffloadError, offload_activations
from hf_offload.transforms.tiling.head import find_head
from hf_offload.transforms.tiling.logits import TiledLogits

VOCABULARY, TOKENS = 96, 12
KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
TITLES = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Encoder-decoder models",
}
SERVED, NOT_TRIED = "served", "not tried"
# Names that configurations give to the same things.
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 32, "emb_dim": 32,
    "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "hidden_dim": 64,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 2, "n_head": 2, "n_heads": 2, "num_heads": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "d_kv": 16, "max_position_embeddings": 64,
    "n_positions": 64, "n_ctx": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
MOST_PARAMETERS = 20_000_000


def small_model(name: str) -> transformers.PreTrainedModel:
    """The model of that class from its configuration, made small where it can be."""
    model_class = getattr(transformers, name)
    config = model_class.config_class()
    for key, value in SMALL.items():
        if hasattr(config, key) and isinstance(getattr(config, key), (int, type(None))):
            setattr(config, key, value)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError("does not get small")
    torch.manual_seed(0)
    return model_class(config)


def step(model: transformers.PreTrainedModel, config: OffloadConfig) -> tuple[torch.Tensor, list[torch.Tensor], bool]:
    """Loss, gradients, and whether the logits were never computed."""
    torch.manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (2, TOKENS))
    with offload_activations(model, config):
        outputs = model(input_ids=tokens, labels=tokens.clone())
        outputs.loss.backward()
    lazy = isinstance(outputs.logits, TiledLogits) and outputs.logits._true is None
    return outputs.loss.detach(), [one.grad for one in model.parameters() if one.grad is not None], lazy


def look_at(name: str) -> str:
    """What became of the head of that class."""
    try:
        model = small_model(name).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        plain, tiled = copy.deepcopy(model), copy.deepcopy(model)
        loss, gradients, _ = step(plain, OffloadConfig(tier="none"))
    except Exception as error:
        return f"{NOT_TRIED}: {type(error).__name__}"
    try:
        find_head(tiled)
    except OffloadError as error:
        return f"refused: {str(error).partition(',')[0]}"
    try:
        found, others, lazy = step(tiled, OffloadConfig(tier="none", tiled_loss="on", tile_bytes=4 * VOCABULARY * 9))
    except Exception as error:
        return f"fails: {type(error).__name__}: {str(error)[:80]}"
    same = torch.allclose(found, loss, rtol=1e-4) and len(gradients) == len(others)
    same = same and all(
        (one - two).norm() <= 1e-4 * one.norm() + 1e-6 for one, two in zip(gradients, others, strict=True)
    )
    if not same:
        return "differs (random, or not deterministic)"
    return SERVED if lazy else "the logits are computed, since its loss reads them"


def survey() -> Iterator[tuple[str, str, str]]:
    """Kind, class and result of every model."""
    classes = []
    for kind, names in KINDS.items():
        for value in names.values():
            classes += [(kind, name) for name in (value if isinstance(value, tuple) else (value,))]
    for kind, name in track(list(dict.fromkeys(classes)), "looking at heads"):
        yield kind, name, look_at(name)


def page(rows: list[tuple[str, str, str]], version: str) -> str:
    """The page, from kind, class and result of every model and the version of transformers."""
    counts, lists = [], []
    for kind, title in TITLES.items():
        results = {name: result for one, name, result in rows if one == kind}
        served = [name for name, result in results.items() if result == SERVED]
        untried = [name for name, result in results.items() if result.startswith(NOT_TRIED)]
        others = len(results) - len(served) - len(untried)
        counts.append(f"| {title} | {len(results)} | {len(served)} | {others} | {len(untried)} |")
        lists.append((title, served, untried))
    differing = [row for row in rows if row[2] != SERVED and not row[2].startswith(NOT_TRIED)]
    lines = [
        "# Output heads of transformers, and the tiled loss",
        "",
        'This page lists the model classes of transformers whose loss can be tiled with `tiled_loss="on"`, and those where',
        "that was tried without success or not at all. `docs/make_tiled_heads.py` writes it.",
        "",
        f"Each class of transformers {version} was built from its default configuration, made small, and trained for a",
        "step with and without tiling. It is *served* if the logits of all tokens never existed, and loss and gradients",
        "are those without tiling.",
        "",
        "| kind of model | classes | served | not served | not tried |",
        "|---|---|---|---|---|",
        *counts,
        "",
        "## Not served",
        "",
        "The loss of these classes is correct with `tiled_loss`, or the setting is refused, but no memory is saved:",
        "",
        "| class | result |",
        "|---|---|",
        *(f"| `{name}` | {result.replace('|', ' ')} |" for _, name, result in differing),
        "",
        "## Served",
    ]
    for title, served, _ in lists:
        lines += ["", f"### {title}", "", _listed(served)]
    lines += ["", "## Not tried", ""]
    lines += ["Their default configuration cannot be made small, or does not train. That says nothing about tiling."]
    for title, _, untried in lists:
        lines += ["", f"**{title}:**", _listed(untried)]
    return "\n".join(lines) + "\n"


def _listed(names: list[str]) -> str:
    return textwrap.fill(", ".join(names) + ".", width=140, break_long_words=False)


def main(path: Path) -> None:
    """Write the page."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    path.write_text(page(list(survey()), transformers.__version__), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
