"""How many bytes of weights, gradients and optimizer state belong to each unit of a model, and an estimate of a step from the
model alone, before any was measured.
"""

import itertools
from collections.abc import Callable, Container, Iterable, Sequence

from torch import nn

from hf_offload.plan.footprint import Footprint, Segment, UnitWeights
from hf_offload.structure.units import find_units
from hf_offload.tensors import nbytes_of, parameter_count


def unit_weights(
    model: nn.Module, units: Iterable[str], state_bytes: int, smallest_bytes: int = 0
) -> dict[str, UnitWeights]:
    """Those of the innermost of ``units`` around each weight, ``state_bytes`` of optimizer state in proportion. Weights of
    fewer than ``smallest_bytes`` are left out.
    """
    names = sorted(units, key=len, reverse=True)
    unit_of = _innermost(names)
    trained_bytes = dict.fromkeys(names, 0)
    sizes: dict[str, list[int]] = {name: [] for name in names}
    borrowed: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
    places: dict[int, tuple[str, int]] = {}  # by id of the weight
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    trained = sum(nbytes_of(p) for p in model.parameters() if p.requires_grad)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if nbytes_of(parameter) < smallest_bytes:
            continue
        path = unit_of(name)
        place = places.setdefault(id(parameter), (path, len(sizes[path])))
        if place != (path, len(sizes[path])):
            if place[0] != path:  # it is tied
                borrowed[path].append(place)
            continue
        sizes[path].append(nbytes_of(parameter))
        trained_bytes[path] += nbytes_of(parameter) * parameter.requires_grad
    ratio = state_bytes / max(1, trained)
    return {
        name: UnitWeights(
            sum(each),
            trained_bytes[name],
            round(trained_bytes[name] * ratio),
            tuple(each),
            tuple(borrowed[name]),
            name in tables,
        )
        for name, each in sizes.items()
        if each or borrowed[name]
    }


def trained_in(model: nn.Module, units: Iterable[str], chosen: Container[str]) -> list[nn.Parameter]:
    """The trained weights whose innermost unit is one of ``chosen``, each once."""
    unit_of = _innermost(sorted(units, key=len, reverse=True))
    return [p for name, p in model.named_parameters() if p.requires_grad and unit_of(name) in chosen]


def _innermost(names: Sequence[str]) -> Callable[[str], str]:
    """What finds the unit that a weight belongs to, of these ``names``, the longest first."""
    known = set(names)

    def unit_of(weight: str) -> str:
        path, _, _ = weight.rpartition(".")
        while path and path not in known:
            path, _, _ = path.rpartition(".")
        return path if path in known else names[-1]  # the model itself, which has the shortest name

    return unit_of


def initial_estimate(
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
    """A step estimated from the model alone: weights, gradients and ``state_bytes`` of optimizer state in forward and
    backward of every unit. All time is that of transfers.

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
        classes={name: unit.kind for name, unit in units.items()},
        parameters=parameter_count(model),
        base_bytes=sum(nbytes_of(tensor) for tensor in {*model.parameters(), *model.buffers()}) + there,
        gradient_bytes=gradient_bytes,
        optimizer_step_bytes=step_bytes,
        optimizer_step_s=0.0,
        source="counted",
        state_bytes=there,
        weights=weights,
    )
