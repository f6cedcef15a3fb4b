"""Which of a model's weights are projected, which decay, and which are stored transposed: an optimizer's parameter groups."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.trainer_pt_utils import get_parameter_names

from hf_offload.errors import OffloadConfigError
from hf_offload.plan.units import find_blocks
from hf_offload.settings.load import nearest

_MATRIX = 2
# As transformers.Trainer.get_decay_parameter_names has it, which needs a Trainer.
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def param_groups(
    model: nn.Module, *, targets: str | Sequence[str] = "auto", weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """The trainable parameters of ``model`` in groups for :class:`~hf_offload.optimizers.projected.ProjectedAdamW`.

    Each group has ``params`` (pairs of name and parameter), ``projected``, ``transposed`` (the weight is stored
    ``[in, out]``, as GPT-2's ``Conv1D`` has it) and ``weight_decay`` (0 for biases and norms, as the Trainer does it).

    Args:
        model: Any model.
        targets: What is projected: ``"auto"``: linear and ``Conv1D`` weights of the repeated blocks. ``"all"``: those outside
            of them too, but never the output head. Or ends of module names, such as ``("q_proj", "mlp.down_proj")``. A weight
            that is tied to an embedding is never projected. Experts that are stored as one tensor of three dimensions are no
            linear layers, and get AdamW.
        weight_decay: Of everything else.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if a target matches nothing that can be projected.
    """
    projected = {id(module.weight): module for module in chosen_linears(model, targets).values()}
    decayed = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
    groups: dict[tuple[bool, bool, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        module = projected.get(id(parameter))
        transposed = isinstance(module, Conv1D)
        rate = weight_decay if name in decayed else 0.0
        group = groups.setdefault(
            (module is None, transposed, -rate),
            {"params": [], "projected": module is not None, "transposed": transposed, "weight_decay": rate},
        )
        group["params"].append((name, parameter))
    return [groups[key] for key in sorted(groups)]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters of ``model``, named, in groups with and without weight decay, as the Trainer makes them."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [pair for pair in trainable if (pair[0] in decayed) == decays],
            "weight_decay": weight_decay * decays,
        }
        for decays in (True, False)
    ]
    return [group for group in groups if group["params"]]


def chosen_linears(model: nn.Module, targets: str | Sequence[str] = "auto") -> dict[str, Any]:
    """The linear layers that ``targets`` means, by name. Raises as :func:`param_groups` does."""
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
