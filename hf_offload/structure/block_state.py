"""What a forward of a block may read and change, in a form that can be compared. Reading it changes nothing."""

import collections
import dataclasses
import functools
import inspect
import itertools
import logging
import random
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.attention import _cur_sdpa_kernel_backends
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_offload import generators
from hf_offload.interrupts import signals_deferred

# How many objects are looked into at most, and how deep.
_MOST_OBJECTS = 5_000
MOST_LEVELS = 6
# Tensors up to this size are compared by value, too: some kernels write without raising the version.
_SMALL_BYTES = 1 << 20

PLAIN = (bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device, torch.Size, torch.layout)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
# Their attributes are torch's own business, or that of a log.
_OPAQUE = (type, types.ModuleType, logging.Logger, weakref.ReferenceType)
# What every module has; hooks are looked at one by one.
_OF_MODULES = frozenset(vars(nn.Module())) - {"_buffers", "_parameters", "training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_CHECKPOINTING = frozenset({"gradient_checkpointing", "_gradient_checkpointing_func"})


def state_of(block: nn.Module, inputs: object = (), *, values: bool = False) -> dict[str, Any]:
    """All that a forward of ``block`` could change and that can be found, by name, to be compared with ``==``.

    Buffers, parameters, attributes of modules and their classes, globals that their methods name, closures of hooks on inner
    modules, the generators of Python and NumPy, and ``inputs``. With ``values``, small tensors are compared by what is in
    them, and not only by their version.
    """
    with signals_deferred, _disable_current_modes(), torch.no_grad():
        return _Look(values).at(block, inputs)


def changed_name(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first name whose state differs; empty if none does."""
    for name in (*before, *after):
        if name not in before or name not in after or before[name] != after[name]:
            return name
    return ""


def inputs_read_again(args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
    """What a recompute takes as it is then. Tensors by position are not among it: checkpointing saves them as autograd does,
    with their versions.
    """
    return [value for value in args if not isinstance(value, torch.Tensor)], kwargs


def read_by(block: nn.Module, inputs: object) -> dict[str, Any]:
    """What a forward of ``block`` with ``inputs`` may read. No random numbers: a block that draws Python's or NumPy's is not
    recomputed.
    """
    parameters = dict(block.named_parameters())
    state = {
        name: value
        for name, value in state_of(block, inputs).items()
        if name not in parameters and not name.endswith(("hooks", "random numbers"))
    }
    for name, parameter in parameters.items():
        if type(parameter) is nn.Parameter or not _may_be_sharded():
            state[name] = _Read(id(parameter), parameter._version, parameter.requires_grad)
    for name, module in block.named_modules():
        state[f"{name}.training".lstrip(".")] = module.training
    state["the contents of an input"] = [zlib.crc32(_bytes_of(one)) for one in tree_leaves(inputs) if _is_anyones(one)]
    state["the default dtype"] = torch.get_default_dtype()
    state["the choice of attention kernels"] = _cur_sdpa_kernel_backends()
    state["the stack of function modes"] = [_Same(mode) for mode in _get_current_function_mode_stack()]
    return state


def _is_anyones(value: Any) -> bool:
    """Whether ``value`` is a tensor that others may write to without a new version: NumPy, or another process."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.requires_grad
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()


def rewritten_name(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first name that both have and whose state differs; empty if none does.

    Sharding puts another parameter in the place of one between forward and backward: its values are the same. What else does
    (``torch.func.functional_call``) means other values, or other leaves for the gradients.
    """
    for name in before.keys() & now.keys():
        one, other = before[name], now[name]
        if one != other and not (isinstance(one, _Read) and one.key != other.key and _may_be_sharded()):
            return name
    return ""


def _may_be_sharded() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@dataclasses.dataclass(frozen=True)
class _Read:
    """A parameter when it was read. ``key`` is its id."""

    key: int
    version: int
    requires_grad: bool


class _Look:
    def __init__(self, values: bool):
        self._values = values
        self._seen: dict[int, Any] = {}  # kept, so that no id is used again
        self._functions: set[types.CodeType] = set()

    def at(self, block: nn.Module, inputs: object) -> dict[str, Any]:
        found: dict[str, Any] = {"an input": self._token(inputs)}
        classes: dict[type, str] = {}
        for name, module in block.named_modules():
            prefix = f"{name}." if name else ""
            classes.setdefault(type(module), f"{type(module).__name__}.")
            for key, value in vars(module).items():
                if key in ("_buffers", "_parameters"):
                    found |= {f"{prefix}{one}": self._token(tensor) for one, tensor in value.items()}
                elif key not in _OF_MODULES and key not in _CHECKPOINTING:
                    found[f"{prefix}{key}"] = self._token(value)
            if name:  # the block's own hooks do not run in a recompute
                hooks = [hook for key in _HOOKS for hook in vars(module)[key].values()]
                found[f"{prefix}hooks"] = [self._token(hook) for hook in hooks]
                for hook in hooks:
                    if isinstance(hook, types.FunctionType):
                        self._look_at_globals(hook, found)
        for cls, prefix in classes.items():
            self._look_at_class(cls, prefix, found)
        found["Python's random numbers"] = random.getstate()
        found["NumPy's random numbers"] = self._token(numpy.random.mtrand._rand)
        return found

    def _look_at_class(self, cls: type, prefix: str, found: dict[str, Any]) -> None:
        for base in cls.__mro__:
            if base.__module__.startswith(("builtins", "torch.", "hf_offload.")):
                continue
            for key, value in vars(base).items():
                if isinstance(value, types.FunctionType):
                    self._look_at_globals(value, found)
                elif isinstance(value, (*_CONTAINERS, int, float)) and not key.startswith("__"):
                    found[f"{prefix}{key}"] = self._token(value)

    def _look_at_globals(self, function: Any, found: dict[str, Any]) -> None:
        function = inspect.unwrap(function)
        if function.__code__ in self._functions:
            return
        self._functions.add(function.__code__)
        names = function.__code__.co_names
        for name in names:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType) and _is_users(value.__name__):
                for attribute in names:
                    self._look_at_global(f"{name}.{attribute}", getattr(value, attribute, None), function, found)
            else:
                self._look_at_global(name, value, function, found)

    def _look_at_global(self, name: str, value: Any, function: Any, found: dict[str, Any]) -> None:
        if isinstance(value, types.FunctionType):
            if value.__module__ == function.__module__ or _is_users(value.__module__):
                self._look_at_globals(value, found)
        elif isinstance(value, (*_CONTAINERS, int, float, torch.Tensor, *generators.KINDS)):
            found[f"the global {name}"] = self._token(value)

    def _token(self, value: Any, levels: int = MOST_LEVELS) -> Any:
        """Something that equals the token of the same value in the same state."""
        if isinstance(value, PLAIN):
            return (value,)  # as part of a tuple, NaN equals itself
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, generators.KINDS):
            state = generators.state_of(value)
            return state.tolist() if isinstance(state, torch.Tensor) else state
        if isinstance(value, itertools.count):
            return repr(value)
        if isinstance(value, _OPAQUE) or levels == 0:
            return _Same(value)
        if id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return _Same(value)
        self._seen[id(value)] = value
        if isinstance(value, dict):
            return [(self._token(key, levels - 1), self._token(one, levels - 1)) for key, one in list(value.items())]
        if isinstance(value, _CONTAINERS):
            return [self._token(one, levels - 1) for one in list(value)]
        inside = [self._token(one, levels - 1) for one in _parts(value)]
        return (_Same(value), inside)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        version = None if tensor.is_inference() else tensor._version
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
        if not self._values or not plain or tensor.nbytes > _SMALL_BYTES:
            return (_Same(tensor), version)
        return (_Same(tensor), version, _bytes_of(tensor.detach().cpu()).tobytes())


def _parts(value: Any) -> Iterator[Any]:
    """What a function or an object of a class of the user's holds."""
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        if not value.__module__.startswith(("torch.", "hf_offload.", "transformers.")):
            for cell in value.__closure__ or ():
                try:
                    yield cell.cell_contents
                except ValueError:  # nothing is in it yet
                    continue
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        yield value.tobytes()
    elif not type(value).__module__.startswith(("torch.", "hf_offload.")) and not isinstance(value, nn.Module):
        yield getattr(value, "__dict__", None)
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield getattr(value, name, None)


@functools.cache
def _is_users(name: str) -> bool:
    """Whether the module of that name is neither of a library nor of Python's."""
    module = sys.modules.get(name)
    file = str(getattr(module, "__file__", None) or "")
    top = name.partition(".")[0]
    return bool(file) and top not in sys.stdlib_module_names and top != "hf_offload" and "site-packages" not in file


class _Same:
    """Equal to another one of the same living object. Does not keep it, where that is possible."""

    __slots__ = ("_get",)

    def __init__(self, value: Any):
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._get()
        return isinstance(other, _Same) and mine is not None and mine is other._get()

    __hash__ = None  # type: ignore[assignment]
