"""A step of which only the model is known: what leaves memory before the first step is planned with it."""

import itertools

from torch import nn

from hf_offload.plan.footprint import Footprint, Segment
from hf_offload.planning.unit_weights import unit_weights
from hf_offload.structure.units import find_units
from hf_offload.tensors import nbytes_of, parameter_count


def footprint_beforehand(
    model: nn.Module,
    *,
    state_bytes: int,
    state_is_there: bool,
    streams: bool,
    keeps_gradients: bool,
    activation_bytes: int,
    smallest_bytes: int,
    step_bytes: int = 0,
) -> Footprint:
    """Weights, gradients and ``state_bytes`` of optimizer state in forward and backward of every unit. All time is that of
    transfers.

    ``state_is_there`` during forward and backward, which it is not in the first step; ``streams``: it and, unless
    ``keeps_gradients``, the gradients are on a tier. ``activation_bytes`` is what else is in memory at any time,
    ``step_bytes`` what the optimizer's step needs for itself.
    """
    units = find_units(model)
    weights = unit_weights(model, units, state_bytes, smallest_bytes)
    trained = sum(nbytes_of(p) for p in model.parameters() if p.requires_grad)
    leaves = streams and not keeps_gradients
    gradient_bytes = 0 if leaves else trained
    forward = [Segment(name, False, activation_bytes, 0, 0.0) for name in units]
    last_first = list(reversed(list(units)))
    arrived = itertools.accumulate(weights[name].trained_bytes if name in weights else 0 for name in last_first)
    backward = [
        Segment(name, True, activation_bytes + (0 if leaves else so_far), 0 if leaves else so_far, 0.0)
        for name, so_far in zip(last_first, arrived, strict=True)
    ]
    there = state_bytes if state_is_there and not streams else 0
    return Footprint(
        segments=(*forward, *backward),
        saved=(),
        blocks=(),
        units={name: unit.block for name, unit in units.items()},
        kinds={name: unit.kind for name, unit in units.items()},
        parameters=parameter_count(model),
        base_bytes=sum(nbytes_of(tensor) for tensor in {*model.parameters(), *model.buffers()}) + there,
        gradient_bytes=gradient_bytes,
        optimizer_step_bytes=step_bytes,
        optimizer_step_s=0.0,
        source="counted",
        state_bytes=there,
        weights=weights,
    )
