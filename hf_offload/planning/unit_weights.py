"""How many bytes of weights, gradients and optimizer state belong to each unit of a model."""

from collections.abc import Iterable

from torch import nn

from hf_offload.plan.footprint import UnitWeights
from hf_offload.planning.recorder import nbytes_of


def unit_weights(
    model: nn.Module, units: Iterable[str], state_bytes: int, smallest_bytes: int = 0
) -> dict[str, UnitWeights]:
    """Those of the innermost of ``units`` around each weight, ``state_bytes`` of optimizer state in proportion. Weights of
    fewer than ``smallest_bytes`` are left out.
    """
    names = sorted(units, key=len, reverse=True)
    found = {name: [0, 0, 0] for name in names}
    seen: set[int] = set()
    trained = sum(nbytes_of(p) for p in model.parameters() if p.requires_grad)
    for name, parameter in model.named_parameters():
        if id(parameter) in seen or nbytes_of(parameter) < smallest_bytes:
            continue
        seen.add(id(parameter))
        path, _, _ = name.rpartition(".")
        while path and path not in found:
            path, _, _ = path.rpartition(".")
        if path not in found:
            path = names[-1]  # the model itself, which has the shortest name
        found[path][0] += nbytes_of(parameter)
        found[path][1] += nbytes_of(parameter) * parameter.requires_grad
        found[path][2] = max(found[path][2], nbytes_of(parameter))
    ratio = state_bytes / max(1, trained)
    return {
        name: UnitWeights(weights, mine, round(mine * ratio), largest)
        for name, (weights, mine, largest) in found.items()
        if weights
    }
