"""Whether others than the optimizer hold its state of a parameter, who then see updates of it, and write to it."""

import collections
import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_offload.parameters.holders import storage_holders


def is_held(states: Mapping[Any, dict[str, Any]], parameter: Tensor, holders: int = 1) -> bool:
    """Whether others hold the state of ``parameter``, a tensor or list in it, or memory of such a tensor: views, NumPy
    arrays, other processes. The state itself has so many ``holders`` that do not count, of which ``states`` is one.
    """
    if _most_references(states, parameter, holders) > _references_of_none():
        return True
    tensors = [each for each in _parts_of(states, parameter) if isinstance(each, Tensor) and _has_storage(each)]
    sharing = collections.Counter(each.untyped_storage()._cdata for each in tensors)
    return any(
        storage_holders(each) > sharing[each.untyped_storage()._cdata] or _is_of_several_processes(each)
        for each in tensors
    )


def shares_memory(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a tensor of one state has the memory of a tensor of the other."""
    of_each = [
        {each.untyped_storage()._cdata for each in one.values() if isinstance(each, Tensor) and _has_storage(each)}
        for one in (state, other)
    ]
    return not of_each[0].isdisjoint(of_each[1])


def _most_references(states: Mapping[Any, dict[str, Any]], parameter: Any, holders: int) -> int:
    """The most references that anything in a state has from anywhere else."""
    times: collections.Counter[int] = collections.Counter()
    found = _parts_of(states, parameter, times)
    times[id(found[0])] += holders
    return max(sys.getrefcount(each) - times[id(each)] for each in found)


@functools.cache
def _references_of_none() -> int:
    """:func:`_most_references` of a state without other holders."""
    return _most_references({0: {"": torch.empty(0, device="cpu")}}, 0, 1)


def _parts_of(
    states: Mapping[Any, dict[str, Any]], parameter: Any, times: "collections.Counter[int] | None" = None
) -> list[Any]:
    """A state, first, and the tensors, lists and dictionaries in it, each once; ``times`` counts how often it is in there."""
    found: list[Any] = [dict.__getitem__(states, parameter)]  # type: ignore[index]
    times = collections.Counter() if times is None else times
    for part in found:
        for each in _inside(part):
            if isinstance(each, (Tensor, list, dict)):
                times[id(each)] += 1
                if times[id(each)] == 1 and each is not found[0]:
                    found.append(each)
    return found


def _inside(part: Any) -> list[Any]:
    if isinstance(part, dict):
        return list(part.values())
    if isinstance(part, list):
        return list(part)
    if is_traceable_wrapper_subclass(part):
        return [getattr(part, name) for name in part.__tensor_flatten__()[0]]
    return []


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)


def _is_of_several_processes(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_shared() and tensor.untyped_storage().filename is None
