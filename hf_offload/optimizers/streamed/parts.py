"""The state of a parameter, and that of its parts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_offload.optimizers.streamed.record import SMALLEST_STATE_BYTES, Record


def split(state: Mapping[str, Any], record: Record) -> list[dict[str, Any]]:
    """A state in parts: tensors of the parameter's shape are cut, everything else belongs to each part."""
    if len(record.sizes) == 1:
        return [{name: own(value) if _stays(value) else value for name, value in state.items()}]
    parts: list[dict[str, Any]] = [{} for _ in record.sizes]
    for name, value in state.items():
        of_elements = isinstance(value, Tensor) and value.shape == record.shape
        values = record.parts_of(value) if of_elements else [own(value) for _ in parts]
        for part, its_value in zip(parts, values, strict=True):
            part[name] = its_value
    return parts


def joined(states: list[dict[str, Any]], record: Record) -> dict[str, Any]:
    """The state of the whole parameter, with tensors of its own."""
    if len(states) == 1:
        return {name: own(value) for name, value in states[0].items()}
    whole: dict[str, Any] = {}
    for name, first in states[0].items():
        if is_of_elements(first, record):
            # No view: the tensor that it is one of would count as someone who holds the state.
            whole[name] = first.new_empty(record.shape)
            torch.cat([state[name] for state in states], out=whole[name].view(-1))
        else:
            whole[name] = own(first)
    return whole


def is_of_elements(first: Any, record: Record) -> bool:
    """Whether something in the state of the first of several parts has a number for each element, as a flat tensor."""
    return len(record.sizes) > 1 and isinstance(first, Tensor) and first.dim() == 1 and first.numel() == record.sizes[0]


def _stays(value: Any) -> bool:
    """Whether a part of a state is kept in memory, where it must not be a part of anything else."""
    return isinstance(value, Tensor) and value.nbytes < SMALLEST_STATE_BYTES


def own(value: Any) -> Any:
    """``value``, with memory of its own."""
    return value.clone() if isinstance(value, Tensor) else value
