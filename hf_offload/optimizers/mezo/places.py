"""Places that hold values of Python, such as a dict or the bytes of an array: how each is read, compared and refilled."""

import array
import collections
import contextvars
import ctypes
import functools
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_offload.generators import are_equal, set_state, state_of

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, frozenset)
"""Types of values that do not change, and are compared as they are."""
BYTES = (
    *(np.ndarray, array.array, bytearray, memoryview),
    *(ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union),
)
"""Types of what is compared by its bytes."""


def _are_alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):  # what reads or writes them is seen
        same = (one.shape, one.dtype, one.device, one.layout) == (other.shape, other.dtype, other.device, other.layout)
        return same and type(one) is type(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    return isinstance(one, (*PLAIN, types.MethodType)) and bool(one == other)


class Place:
    """Something that holds values.

    Args:
        name: What it is, in words.
        read: Gives the values that it holds now.
        write: Lets it hold values that were read before.
        are_alike: Whether one value is the same as another one for what a model computes.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], list[Any]],
        write: Callable[[list[Any]], None],
        are_alike: Callable[[Any, Any], bool] = _are_alike,
    ):
        self._name = name
        self._read = read
        self._write = write
        self._are_alike = are_alike
        self._first = self._last = read()

    def items(self) -> Iterable[tuple[Any, Any]]:
        """The values that it held first, each with its key or index."""
        return self._items(self._first)

    def is_changed(self) -> bool:
        """Whether something else than a tensor is another one, or a tensor has another shape."""
        now = self._read()
        if len(now) == len(self._last) and all(map(operator.is_, now, self._last)):
            return False
        if len(now) != len(self._first) or not all(map(self._are_alike, now, self._first)):
            return True
        self._last = now
        return False

    def restore(self) -> None:
        """Let the values be what they were."""
        now = self._read()
        if len(now) != len(self._first) or not all(map(operator.is_, now, self._first)):
            self._write(self._first)

    def changed_name(self) -> str:
        """What has changed, in words."""
        before = dict(self.items())
        for key, value in self._items(self._read()):
            if isinstance(key, str) and not (key in before and self._are_alike(value, before[key])):
                return f"{self._name}.{key}"
        return self._name

    def _items(self, values: list[Any]) -> Iterable[tuple[Any, Any]]:
        return enumerate(values)


class Names(Place):
    """A place that holds values by name: ``read`` gives a mapping, and ``write`` takes one."""

    def __init__(self, name: str, read: Callable[[], Mapping[Any, Any]], write: Callable[[dict[Any, Any]], None]):
        super().__init__(
            name, lambda: [*(now := read()), *now.values()], lambda values: write(dict(self._items(values)))
        )

    def _items(self, values: list[Any]) -> Iterable[tuple[Any, Any]]:
        count = len(values) // 2
        return zip(values[:count], values[count:], strict=True)


def names(name: str, mapping: dict[Any, Any]) -> Names:
    """What a mapping holds."""
    return Names(name, lambda: mapping, functools.partial(_refill_mapping, mapping))


def container(name: str, value: Any) -> Place | None:
    """What a dict, list, deque, set or cell holds; None for a value of another kind."""
    if isinstance(value, dict):
        return names(name, value)
    if isinstance(value, (list, collections.deque)):
        return Place(name, functools.partial(list, value), functools.partial(_refill, value))
    if isinstance(value, set):
        return Place(name, lambda: [frozenset(value)], lambda old: _refill_set(value, *old))
    if isinstance(value, types.CellType):
        return Place(name, lambda: _content(value), lambda old: _refill_cell(value, old))
    return None


def generator(name: str, value: Any) -> Place:
    """The state of one of :data:`~hf_offload.generators.KINDS`."""
    return Place(name, lambda: [state_of(value)], lambda old: set_state(value, *old), are_equal)


def elements(name: str, array: np.ndarray) -> Place:
    """The objects in an array of objects."""
    return Place(name, lambda: list(array.flat), functools.partial(_refill_array, array))


def content(name: str, value: Any) -> Place:
    """The bytes of one of :data:`BYTES`."""
    return Place(name, lambda: [_shape(value), _bytes(value)], lambda old: _refill_bytes(value, old[1]))


def slots(name: str, value: Any) -> Names | None:
    """What an object holds in the slots of its classes; None if these have none."""
    members = {
        key: slot
        for each in reversed(type(value).__mro__)
        if "__slots__" in vars(each)
        for key, slot in vars(each).items()
        if isinstance(slot, types.MemberDescriptorType)
    }

    def read() -> dict[str, Any]:
        return {key: slot.__get__(value) for key, slot in members.items() if hasattr(value, key)}

    def write(before: dict[str, Any]) -> None:
        for key, slot in members.items():
            if key in before:
                slot.__set__(value, before[key])
            elif hasattr(value, key):
                slot.__delete__(value)

    return Names(name, read, write) if members else None


def attributes(kind: type) -> Names:
    """Those of a class, without what it has inherited."""
    return Names(kind.__name__, functools.partial(vars, kind), functools.partial(_refill_class, kind))


def variable(name: str, value: contextvars.ContextVar[Any]) -> Place:
    """What a context variable is set to. Raises ``LookupError`` for one that is not set."""
    return Place(name, lambda: [value.get()], lambda old: _set_variable(value, *old))


def size(value: Any) -> int:
    """How many bytes one of :data:`BYTES` has."""
    return int(value.nbytes) if isinstance(value, np.ndarray) else memoryview(value).nbytes


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def _refill(values: Any, old: list[Any]) -> None:
    values.clear()
    values.extend(old)


def _refill_set(values: set[Any], old: frozenset[Any]) -> None:
    values.clear()
    values.update(old)


def _refill_cell(cell: types.CellType, old: list[Any]) -> None:
    if old:
        cell.cell_contents = old[0]
    else:
        del cell.cell_contents


def _refill_mapping(mapping: dict[Any, Any], before: dict[Any, Any]) -> None:
    if list(mapping) != list(before):
        mapping.clear()
    mapping.update(before)


def _refill_class(kind: type, before: dict[str, Any]) -> None:
    for key in set(vars(kind)) - set(before):
        delattr(kind, key)
    for key, value in before.items():
        if vars(kind).get(key) is not value:
            setattr(kind, key, value)


def _set_variable(variable: contextvars.ContextVar[Any], value: Any) -> None:
    variable.set(value)


def _shape(value: Any) -> tuple[Any, ...]:
    return (value.shape, value.dtype.str) if isinstance(value, np.ndarray) else ()


def _bytes(value: Any) -> bytes:
    return value.tobytes() if isinstance(value, (np.ndarray, array.array, memoryview)) else bytes(value)


def _refill_bytes(value: Any, old: bytes) -> None:
    if isinstance(value, np.ndarray):
        value[...] = np.frombuffer(old, value.dtype).reshape(value.shape)
    elif isinstance(value, array.array):
        del value[:]
        value.frombytes(old)
    elif isinstance(value, bytearray):
        value[:] = old
    elif isinstance(value, memoryview):
        value.cast("B")[:] = old
    else:
        ctypes.memmove(ctypes.addressof(value), old, len(old))


def _refill_array(value: np.ndarray, old: list[Any]) -> None:
    for index, one in enumerate(old):
        value.flat[index] = one
