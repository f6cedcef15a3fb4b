"""What an optimizer's attributes and options hold, as deep as that goes: copies of it, and whether it has changed.

Note: what is copied
    A step may change a dictionary, a list, an object or a generator that the optimizer keeps. The trial must not change the
    user's, and an update that waits must find what was there at its step. So everything that holds values is copied, but what
    belongs to others: parameters, modules and optimizers, whose copies would be neither small nor the ones that train.
"""

import collections
import copy
import functools
import logging
import random
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_MOST_VALUES = 100_000
SHARED = (
    *(type, types.ModuleType, types.BuiltinFunctionType, logging.Logger, weakref.ref, type(threading.Lock())),
    *(type(threading.RLock()), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(torch.Stream, torch.distributed.ProcessGroup),
)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...), np.generic)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


class NotCopied(Exception):
    """Something that cannot be copied, or belongs to others. The message says what it is."""


def copied(values: Mapping[str, Any], itself: Optimizer, other: Any) -> dict[str, Any]:
    """Deep copies of ``values`` of the optimizer ``itself``, in whose place they refer to the ``other`` one.

    Raises :class:`NotCopied`.
    """
    copying = Copying({id(itself): other})
    found = {}
    for name, value in values.items():
        try:
            found[name] = copying.copy(value)
        except NotCopied as error:
            raise NotCopied(f"{name!r} holds {error}") from None
        except Exception as error:
            raise NotCopied(f"{name!r} cannot be copied ({type(error).__name__}: {error})") from error
    return found


class Copying:
    """Makes copies that refer to each other as the originals do. ``done`` has them by the ids of the originals."""

    def __init__(self, done: dict[int, Any]):
        self._done = done
        self._kept: list[Any] = []  # ids are those of objects that are there

    def copy(self, value: Any) -> Any:
        """A deep copy.

        Raises :class:`NotCopied` for what belongs to others, and what :func:`copy.deepcopy` raises.
        """
        if isinstance(value, (*_ATOMS, *SHARED)):
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        if len(self._done) > _MOST_VALUES:
            raise NotCopied(f"more than {_MOST_VALUES} values")
        self._kept.append(value)
        if isinstance(value, (nn.Parameter, nn.Module, Optimizer)):
            kind = "parameter" if isinstance(value, nn.Parameter) else type(value).__name__
            raise NotCopied(f"a {kind}, which belongs to others")
        made = self._made(value)
        self._done[id(value)] = made
        return made

    def _made(self, value: Any) -> Any:
        kind = type(value)
        if kind is Tensor:
            made = value.detach().clone()
            return made.requires_grad_(value.requires_grad)
        if kind is torch.Generator:
            return value.clone_state()
        if kind in _MAPPINGS:
            made = self._done[id(value)] = value.copy()
            made.clear()
            made.update((self.copy(key), self.copy(each)) for key, each in value.items())
            return made
        if kind in (list, collections.deque):
            made = self._done[id(value)] = value.copy()
            made.clear()
            made.extend(self.copy(each) for each in value)
            return made
        if kind in _SEQUENCES:
            parts = [self.copy(each) for each in value]
            unchanged = kind is not set and all(part is each for part, each in zip(parts, value, strict=True))
            return value if unchanged else kind(parts)
        if kind is types.FunctionType:
            return self._function(value)
        if kind is types.MethodType:
            return types.MethodType(self.copy(value.__func__), self.copy(value.__self__))
        if kind is functools.partial:
            keywords = {name: self.copy(each) for name, each in value.keywords.items()}
            return functools.partial(self.copy(value.func), *map(self.copy, value.args), **keywords)
        if _is_plain(kind):
            made = self._done[id(value)] = object.__new__(kind)
            vars(made).update((name, self.copy(each)) for name, each in vars(value).items())
            return made
        for each in _inside(value):
            self.copy(each)  # whether all of it can be
        return copy.deepcopy(value)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        defaults, named = self.copy(function.__defaults__), self.copy(function.__kwdefaults__)
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, defaults, tuple(cells) if cells else None
        )
        made.__kwdefaults__ = named
        vars(made).update((name, self.copy(each)) for name, each in vars(function).items())
        return made

    def _cell(self, cell: types.CellType) -> types.CellType:
        if id(cell) not in self._done:
            made = self._done[id(cell)] = types.CellType()
            self._kept.append(cell)
            for each in _inside(cell):
                made.cell_contents = self.copy(each)
        return self._done[id(cell)]  # type: ignore[no-any-return]


def told(values: Any, itself: Optimizer | None = None) -> list[Any]:
    """All there is in ``values``, which is equal for equal values and for copies. ``itself`` is not looked into."""
    found: list[Any] = []
    seen: dict[int, int] = {id(itself): -1}
    kept: list[Any] = []

    def tell(value: Any) -> None:
        kind = type(value)
        if isinstance(value, _ATOMS):
            found.append((kind, repr(value)))
            return
        if id(value) in seen:
            found.append(seen[id(value)])
            return
        seen[id(value)] = len(seen)
        kept.append(value)
        found.append(kind)
        if isinstance(value, (*SHARED, nn.Module, Optimizer)):
            found.append(id(value))
        elif isinstance(value, (set, frozenset)):
            found.append(sorted(repr(told(each, itself)) for each in value))
        else:
            found.append(_own_value(value))
            inside = _inside(value)
            found.append(len(inside))
            for each in inside:
                tell(each)

    tell(values)
    return found


def _own_value(value: Any) -> Any:
    """What a value is, without what is inside it."""
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes() if value.dtype.kind != "O" else repr(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, types.FunctionType):
        return value.__code__
    if (
        isinstance(value, (types.CellType, types.MethodType, functools.partial))
        or _is_plain(type(value))
        or type(value) in (*_SEQUENCES, *_MAPPINGS)
    ):
        return None
    try:
        return repr(value.__reduce_ex__(4)[1:])
    except Exception:
        return None


def _tensor(tensor: Tensor) -> Any:
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return repr(tensor)
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), bits.numpy().tobytes()


def _is_plain(kind: type) -> bool:
    """Whether objects of this class are what is in their ``__dict__``."""
    base: Any = object
    return (
        kind.__dictoffset__ != 0
        and kind.__flags__ & _OF_PYTHON_CODE != 0
        and kind.__new__ is base.__new__
        and kind.__reduce_ex__ is base.__reduce_ex__
        and kind.__reduce__ is base.__reduce__
        and not any(hasattr(kind, name) for name in ("__deepcopy__", "__setstate__"))
        and getattr(kind, "__getstate__", None) is getattr(base, "__getstate__", None)
        and not any(vars(each).get("__slots__") for each in kind.__mro__)
    )


_OF_PYTHON_CODE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _inside(value: Any) -> list[Any]:
    """The values that ``value`` refers to."""
    found: list[Any] = []
    if isinstance(value, dict):
        found += [part for item in value.items() for part in item]
    if isinstance(value, _SEQUENCES):
        found += value
    if isinstance(value, types.FunctionType):
        found += [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        found += [value.func, value.args, value.keywords]
    if isinstance(value, types.CellType):
        try:
            found.append(value.cell_contents)
        except ValueError:  # it is empty
            return []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = [slots] if isinstance(slots, str) else list(slots)
        found += [
            getattr(value, name) for name in names if name not in ("__dict__", "__weakref__") and hasattr(value, name)
        ]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        found += [part for item in attributes.items() for part in item]
    return found


class RandomNumbers:
    """The generators that a whole process shares: those of PyTorch, on ``device`` too, of Python and of NumPy."""

    def __init__(self, device: torch.device):
        accelerator = torch.accelerator.current_accelerator()
        self._module: Any = None
        if accelerator is not None and device.type == accelerator.type:
            self._module = torch.get_device_module(device)
        self._device = device
        self._states = self._present()

    @property
    def were_drawn(self) -> bool:
        """Whether one was, since this was made or restored."""
        return any(not _is_same(one, other) for one, other in zip(self._states, self._present(), strict=True))

    def restore(self) -> None:
        """Let it be as it was."""
        setters: list[Callable[[Any], Any]] = [torch.set_rng_state, random.setstate, np.random.set_state]
        module = self._module
        if module is not None:
            setters.append(lambda state: module.set_rng_state(state, self._device))
        for put, state in zip(setters, self._states, strict=True):
            put(state)

    def _present(self) -> list[Any]:
        found = [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]  # noqa: NPY002  what users draw from
        if self._module is not None:
            found.append(self._module.get_rng_state(self._device))
        return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return told(one) == told(other) if isinstance(one, dict) else bool(one == other)
