"""Tensors of a nested state in one buffer, so that they move as one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_ALIGN_BYTES = 64
"""Of vector instructions, and of the widest number there is."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """A tensor that moves: ``like`` has its shape, strides and dtype, and no bytes."""

    offset: int
    like: Tensor


@dataclasses.dataclass(frozen=True)
class _Wrapped:
    """A tensor made of others, such as a quantised one, or a part of one that is sharded."""

    rebuild: Callable[[dict[str, Any]], Tensor]
    inside: dict[str, Any]


class Packing:
    """Where the tensors of ``state`` lie in one buffer. What is not a plain tensor, or is smaller than ``smallest_bytes``, is
    kept here; so are tensors on a device other than ``device``, if one is named.

    Attributes:
        nbytes: Bytes of the buffer.
        tensor_bytes: Bytes of the tensors in it.
    """

    def __init__(self, state: Mapping[str, Any], smallest_bytes: int = 0, device: torch.device | None = None):
        self.nbytes = self.tensor_bytes = 0
        self._smallest_bytes = smallest_bytes
        self._device = device
        self._entries = {key: self._plan(value) for key, value in state.items()}

    def fill(self, buffer: Tensor, state: Mapping[str, Any]) -> None:
        """Copy the tensors of ``state``, which has the form of the one that was planned for, to ``buffer``."""
        for key, entry in self._entries.items():
            _copy(entry, state[key], buffer)

    def views(self, buffer: Tensor) -> dict[str, Any]:
        """The state, whose tensors are views of ``buffer``."""
        return {key: _view(entry, buffer) for key, entry in self._entries.items()}

    def copies(self, buffer: Tensor) -> dict[str, Any]:
        """The state, whose tensors are copies of what is in ``buffer``, with storages of their own."""
        return {key: _cloned(entry, _view(entry, buffer)) for key, entry in self._entries.items()}

    @property
    def places(self) -> dict[str, tuple[int, Tensor]] | None:
        """Where each tensor that moves begins, and one like it without bytes; None if some of them are made of others."""
        if any(isinstance(entry, _Wrapped) for entry in self._entries.values()):
            return None
        return {key: (entry.offset, entry.like) for key, entry in self._entries.items() if isinstance(entry, _Place)}

    @property
    def names(self) -> list[str]:
        """Those of the state, in its order."""
        return list(self._entries)

    @property
    def rest(self) -> dict[str, Any]:
        """What does not move."""
        return {key: entry for key, entry in self._entries.items() if not isinstance(entry, (_Place, _Wrapped))}

    def keep(self, state: Mapping[str, Any], views: Mapping[str, Any]) -> bool:
        """Whether ``state``, which began as ``views``, still has all its tensors where they were; the rest is noted."""
        if state.keys() != self._entries.keys():
            return False
        if any(
            isinstance(entry, (_Place, _Wrapped)) and state[key] is not views[key]
            for key, entry in self._entries.items()
        ):
            return False
        self._entries |= {
            key: state[key] for key, entry in self._entries.items() if not isinstance(entry, (_Place, _Wrapped))
        }
        return True

    def _plan(self, value: Any) -> Any:
        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            kind, size, stride = type(value), value.shape, value.stride()
            return _Wrapped(
                lambda inside: kind.__tensor_unflatten__(inside, context, size, stride),
                {name: self._plan(getattr(value, name)) for name in names},
            )
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return value
        if value.nbytes < self._smallest_bytes or self._device not in (None, value.device):
            return value
        offset = -(-self.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.nbytes = offset + value.nbytes
        self.tensor_bytes += value.nbytes
        return _Place(offset, torch.empty_like(value, device="meta", requires_grad=False))


def _part(place: _Place, buffer: Tensor) -> Tensor:
    # In the order of memory, which is not that of the shape where strides say so.
    flat = buffer[place.offset : place.offset + place.like.nbytes].view(place.like.dtype)
    return flat.as_strided(place.like.shape, place.like.stride(), flat.storage_offset())


def _copy(entry: Any, value: Any, buffer: Tensor) -> None:
    if isinstance(entry, _Place):
        _part(entry, buffer).copy_(value.detach())
    elif isinstance(entry, _Wrapped):
        for name, inside in entry.inside.items():
            _copy(inside, getattr(value, name), buffer)


def _view(entry: Any, buffer: Tensor) -> Any:
    if isinstance(entry, _Place):
        return _part(entry, buffer)
    if isinstance(entry, _Wrapped):
        return entry.rebuild({name: _view(inside, buffer) for name, inside in entry.inside.items()})
    return entry


def _cloned(entry: Any, value: Any) -> Any:
    return value.clone() if isinstance(entry, (_Place, _Wrapped)) else value
