"""Which linear layers a method works on: all of the blocks, all of the model, or those that targets name."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import nearest
from hf_offload.structure.units import find_blocks

_MATRIX = 2


def chosen_linears(model: nn.Module, targets: str | Sequence[str] = "auto") -> dict[str, Any]:
    """The linear layers that ``targets`` means, by name.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if a target matches nothing that can be chosen.
    """
    if isinstance(targets, str) and targets not in ("auto", "all"):
        targets = tuple(name.strip() for name in targets.split(","))
    left = {name: _why_not(name, module, model, targets) for name, module in _linears(model)}
    unmatched = (
        [] if isinstance(targets, str) else [target for target in targets if not any(_ends(n, target) for n in left)]
    )
    chosen = {name: model.get_submodule(name) for name, why in left.items() if why is None}
    if unmatched or not chosen:
        raise OffloadConfigError(_nothing_matches(targets, unmatched, left))
    return chosen


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            yield name, module


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _why_not(name: str, module: Any, model: nn.Module, targets: str | Sequence[str]) -> str | None:
    if not module.weight.requires_grad:
        return "its weight is frozen"
    if module.weight.dim() != _MATRIX:
        return "its weight is no matrix"  # a shard of FSDP1 is flat
    if any(module.weight is other.weight for other in model.modules() if isinstance(other, nn.Embedding)):
        return "its weight is an embedding too"
    if not isinstance(targets, str):
        return None if any(_ends(name, target) for target in targets) else "no target names it"
    find_head: Any = getattr(model, "get_output_embeddings", None)
    if find_head is not None and module is find_head():
        return "it is the output head"
    if targets == "auto" and not any(name == block or name.startswith(f"{block}.") for block in find_blocks(model)):
        return "it is outside of the repeated blocks"
    return None


def _nothing_matches(targets: str | Sequence[str], unmatched: Sequence[str], left: dict[str, str | None]) -> str:
    wanted = targets if isinstance(targets, str) else ", ".join(unmatched or targets)
    ends = {name.rpartition(".")[2] for name in left}
    hint = "" if isinstance(targets, str) else nearest(unmatched[0] if unmatched else wanted, ends)
    reasons = "; ".join(sorted({why for why in left.values() if why}))
    kinds = sorted({re.sub(r"\.\d+\.", ".N.", name) for name in left})
    return (
        f"targets={wanted!r} matches no linear layer that can be chosen{f' ({reasons})' if reasons else ''}.{hint} "
        f"Linear layers of this model: {', '.join(kinds) or 'none'}."
    )
