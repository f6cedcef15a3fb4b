"""Choosing layers of a model: all of the blocks, all of the model, or those that are named by the end of their name."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import nearest
from hf_offload.structure.units import find_blocks

WhyNot = Callable[[str, Any], str | None]
"""Of a layer's name and the layer: why it is not chosen; None if it is."""
_MATRIX = 2


def chosen_linears(model: nn.Module, targets: str | Sequence[str] = "auto") -> dict[str, Any]:
    """The linear layers with a trainable matrix of their own that ``targets`` means, by name.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if a target matches nothing that can be chosen.
    """
    if isinstance(targets, str) and targets not in ("auto", "all"):
        targets = tuple(name.strip() for name in targets.split(","))
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    outside = outside_of_blocks(model)

    def unfit(name: str, layer: Any) -> str | None:
        if not layer.weight.requires_grad:
            return "its weight is frozen"
        if layer.weight.dim() != _MATRIX:
            return "its weight is not a matrix"  # a shard of FSDP1 is flat
        return "its weight is an embedding too" if any(layer.weight is one for one in embeddings) else None

    def unwanted(name: str, layer: Any) -> str | None:
        if layer is find_head():
            return "it is the output head"
        return outside(name, layer) if targets == "auto" else None

    return choose_linears(model, targets, unfit, unwanted, every_target=True)[0]


def choose_linears(
    model: nn.Module, targets: str | Sequence[str], unfit: WhyNot, unwanted: WhyNot, *, every_target: bool = False
) -> tuple[dict[str, Any], dict[str, str]]:
    """Linear layers (GPT-2's ``Conv1D`` included) by name, and why each of the others is left alone.

    ``unfit`` is asked about every layer, ``unwanted`` only where ``targets`` is a word such as ``"auto"`` and no list of ends
    of names.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if no layer is chosen, with ``every_target`` if a target names none.
    """
    chosen: dict[str, Any] = {}
    left: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, (nn.Linear, Conv1D)):
            continue
        reason = unfit(name, layer)
        if reason is None and isinstance(targets, str):
            reason = unwanted(name, layer)
        elif reason is None and not any(is_named(name, target) for target in targets):
            reason = "no target names it"
        if reason is None:
            chosen[name] = layer
        else:
            left[name] = reason
    names = [*chosen, *left]
    listed = () if isinstance(targets, str) else targets
    unmatched = [target for target in listed if not any(is_named(name, target) for name in names)]
    if chosen and not (every_target and unmatched):
        return chosen, left
    wanted = targets if isinstance(targets, str) else ", ".join(unmatched or targets)
    hint = nearest((unmatched or targets)[0], {name.rpartition(".")[2] for name in names}) if listed else ""
    reasons = "; ".join(sorted(set(left.values())))
    kinds = sorted({re.sub(r"\.\d+\.", ".N.", name) for name in names})
    raise OffloadConfigError(
        f"targets={wanted!r} matches no linear layer that can be chosen{f' ({reasons})' if reasons else ''}.{hint} "
        f"Linear layers of this model: {', '.join(kinds) or 'none'}."
    )


def outside_of_blocks(model: nn.Module) -> WhyNot:
    """Refuses what is not in one of the model's repeated blocks."""
    blocks = tuple(find_blocks(model))

    def why_not(name: str, layer: Any) -> str | None:
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        return None if inside else "it is outside of the repeated blocks"

    return why_not


def is_named(name: str, ending: str) -> bool:
    """Whether ``ending`` is the name of a module or its last parts, such as ``mlp.up_proj``."""
    return name == ending or name.endswith(f".{ending}")
