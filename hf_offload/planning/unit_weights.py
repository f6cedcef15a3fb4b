"""How many bytes of weights, gradients and optimizer state belong to each unit of a model."""

from collections.abc import Iterable

from torch import nn

from hf_offload.plan.footprint import UnitWeights
from hf_offload.tensors import nbytes_of


def unit_weights(
    model: nn.Module, units: Iterable[str], state_bytes: int, smallest_bytes: int = 0
) -> dict[str, UnitWeights]:
    """Those of the innermost of ``units`` around each weight, ``state_bytes`` of optimizer state in proportion. Weights of
    fewer than ``smallest_bytes`` are left out.
    """
    names = sorted(units, key=len, reverse=True)
    trained_bytes = dict.fromkeys(names, 0)
    sizes: dict[str, list[int]] = {name: [] for name in names}
    borrowed: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
    places: dict[int, tuple[str, int]] = {}  # by id of the weight
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    trained = sum(nbytes_of(p) for p in model.parameters() if p.requires_grad)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if nbytes_of(parameter) < smallest_bytes:
            continue
        path, _, _ = name.rpartition(".")
        while path and path not in sizes:
            path, _, _ = path.rpartition(".")
        if path not in sizes:
            path = names[-1]  # the model itself, which has the shortest name
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
