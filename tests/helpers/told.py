"""All that objects hold, to be compared before and after."""

import collections
import functools
import logging
import random
import threading
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SHARED = (
    *(type, types.ModuleType, types.BuiltinFunctionType, logging.Logger, weakref.ref, type(threading.Lock())),
    *(type(threading.RLock()), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(torch.Stream, torch.distributed.ProcessGroup),
)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...), np.generic)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


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
