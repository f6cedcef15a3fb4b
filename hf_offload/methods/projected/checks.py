"""Checks of parameters and state dicts of projected optimizers."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_offload.errors import OffloadConfigError
from hf_offload.methods.projected.config import ProjectedConfig
from hf_offload.methods.projected.projections import Projection
from hf_offload.settings.load import collect_errors


def check_numbers(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise :class:`OffloadConfigError` with all that are out of range."""
    with collect_errors("numbers of the optimizer") as check:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            with check:
                if not isinstance(value, (int, float)) or not value >= 0:
                    raise OffloadConfigError(f"{name}={value!r}: give a number of 0 or more.")
        with check:
            if not all(0 <= beta < 1 for beta in betas):
                raise OffloadConfigError(f"betas={betas!r}: give two numbers of at least 0 and below 1.")


def check_parameters(
    parameters: Iterable[tuple[str, Tensor, bool, Projection | None]], method: ProjectedConfig
) -> None:
    """Raise :class:`OffloadConfigError` with all that cannot be optimised.

    ``parameters`` are name, parameter, whether it is to be projected, and what on (None where that is impossible).
    """
    # Blocks differ in nothing but their number, and one line for all of them is enough.
    problems = dict.fromkeys(
        _problem(re.sub(r"\.\d+\.", ".N.", name), parameter, projected, projection, method)
        for name, parameter, projected, projection in parameters
    )
    with collect_errors("parameters of the optimizer") as check:
        for problem in problems:
            with check:
                if problem is not None:
                    raise OffloadConfigError(problem)


def _problem(
    name: str, parameter: Tensor, projected: bool, projection: Projection | None, method: ProjectedConfig
) -> str | None:
    if isinstance(parameter, DTensor):
        return sharded(method, name)
    if not parameter.is_floating_point():
        return f"Parameter {name} is {parameter.dtype}: only real floating point is optimised."
    if not projected:
        return None
    if projection is None:
        return f"Parameter {name} has the shape {tuple(parameter.shape)}: only matrices are projected."
    if projection.basis_shapes and projection.rank > min(projection.shape):
        return (
            f"rank={projection.rank} is above what parameter {name}, {tuple(parameter.shape)}, has: give "
            f"{min(projection.shape)} or less, or leave it out of the targets."
        )
    return None


def sharded(method: ProjectedConfig, name: str) -> str:
    """Why FSDP2's parameters are refused."""
    return (
        f"Parameter {name} is sharded (DTensor): {method.name} needs whole matrices. Train with DistributedDataParallel, or "
        "with FSDP2 and torch.optim.AdamW."
    )


def check_state_dict(state_dict: Mapping[str, Any], groups: list[dict[str, Any]], method: ProjectedConfig) -> None:
    """Raise :class:`OffloadConfigError` unless ``state_dict`` was saved with ``method`` and groups like ``groups``."""
    saved_groups = state_dict["param_groups"]
    saved = saved_groups[0].get("method")
    if not isinstance(saved, dict):
        raise OffloadConfigError(
            f"The state dict was not saved by a projected optimizer, but this one is {method.name}: go on with the optimizer "
            "that saved it, or start without its state."
        )
    wrong = [
        f"{name}={saved.get(name)!r}, but this optimizer has {mine!r}"
        for name, mine in method.as_dict().items()
        if saved.get(name) != mine
    ]
    wrong += [
        f"{name}={theirs.get(name)} in group {number}, but this optimizer has {own[name]}"
        for number, (theirs, own) in enumerate(zip(saved_groups, groups, strict=False))
        for name in ("projected", "transposed")
        if theirs.get(name) != own[name]
    ]
    if wrong:
        raise OffloadConfigError(
            f"The state dict was saved with {'; '.join(wrong)}: resume with the same, or start without the state."
        )
