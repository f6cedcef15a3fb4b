"""Which of a model's weights are projected, which decay, and which are stored transposed: an optimizer's parameter groups."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.trainer_pt_utils import get_parameter_names

from hf_offload.structure.linears import chosen_linears

# As transformers.Trainer.get_decay_parameter_names has it, which needs a Trainer.
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]

WeightDecay = float | Callable[[nn.Parameter, bool], float]
"""That of all weights but biases and norms, or what says it of each parameter and of whether it is a weight."""


def param_groups(
    model: nn.Module, *, targets: str | Sequence[str] = "auto", weight_decay: WeightDecay = 0.0
) -> list[dict[str, Any]]:
    """The trainable parameters of ``model`` in groups for :class:`~hf_offload.methods.projected.ProjectedAdamW`.

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
        rate = _rate(weight_decay, parameter, name in decayed)
        group = groups.setdefault(
            (module is None, transposed, -rate),
            {"params": [], "projected": module is not None, "transposed": transposed, "weight_decay": rate},
        )
        group["params"].append((name, parameter))
    return [groups[key] for key in sorted(groups)]


def decay_groups(model: nn.Module, weight_decay: WeightDecay) -> list[dict[str, Any]]:
    """The trainable parameters of ``model``, named, in groups with and without weight decay, as the Trainer makes them."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], _NO_DECAY))
    groups: dict[tuple[bool, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = _rate(weight_decay, parameter, name in decayed)
            group = groups.setdefault((name not in decayed, -rate), {"params": [], "weight_decay": rate})
            group["params"].append((name, parameter))
    return [groups[key] for key in sorted(groups)]


def _rate(weight_decay: WeightDecay, parameter: nn.Parameter, decays: bool) -> float:
    return weight_decay(parameter, decays) if callable(weight_decay) else weight_decay * decays
