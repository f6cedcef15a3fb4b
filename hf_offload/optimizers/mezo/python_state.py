"""What two passes that take turns could leave to each other outside of tensors.

Note: what is looked at
    What modules, objects and containers on them, their classes with the functions in them, the files that define these, and
    what their hooks refer to have as attributes, slots, elements or bytes, context variables, and the states of generators.
    What may change and cannot be compared, such as an iterator, lets a model take two passes.

    What is not seen are Python numbers that a model keeps anywhere else between its blocks, such as in files or in objects of
    PyTorch.
"""

import collections
import contextvars
import functools
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_offload.generators import KINDS, are_equal, process_states, set_process_states
from hf_offload.optimizers.mezo import places
from hf_offload.optimizers.mezo.pairs import UnfitError
from hf_offload.optimizers.mezo.places import BYTES, PLAIN, Names, Place

_COMMON = {"torch", "hf_offload", "accelerate", "numpy", "rich", "tqdm"}
_LIBRARIES = _COMMON | set(sys.stdlib_module_names) - {"types"}
"""What they keep does not change what a model computes."""
_OPAQUE = _COMMON | {
    *("_abc", "_io", "_thread", "_weakref", "abc", "ast", "asyncio", "concurrent", "datetime", "decimal", "enum"),
    *("fractions", "importlib", "inspect", "io", "logging", "operator", "os", "pathlib", "re", "signal", "socket"),
    *("ssl", "subprocess", "tempfile", "threading", "typing", "uuid", "warnings", "weakref", "zoneinfo"),
}
"""What their objects keep does not change what a model computes, or cannot change; those of other libraries are looked at."""
_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}
_UNSEEN = set(vars(nn.Module())) - {"_buffers", "_modules"} - _HOOKS
"""What PyTorch keeps on each module for other things than a forward."""
_TABLES = "transformers.models.auto.auto_factory"
"""What its mappings hold are all models, which are imported when they are read."""
_LEVELS = 2
"""Of objects in objects that are looked at."""
_MOST_BYTES = 64 << 20
"""Of one array that is compared."""
_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property)
_WRAPPERS = (types.MethodType, functools.partial, *_DESCRIPTORS)
_WRAPPED = ("__self__", "__func__", "func", "args", "keywords", "fget", "fset")
"""What :data:`_WRAPPERS` refer to."""
_FIXED = (
    *(types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType, types.CodeType),
    *(types.GenericAlias, types.MappingProxyType, types.FrameType, types.EllipsisType, types.NotImplementedType),
    *(types.UnionType, slice, range),
)
"""Types of what has no state of its own."""
_KEPT = (
    *(dict, list, set, collections.deque, nn.Module, types.FunctionType, types.MethodType, functools.partial),
    *(contextvars.ContextVar, weakref.ReferenceType, *KINDS, *BYTES, *_DESCRIPTORS),
)
"""Types of attributes of classes, and of names of files, that are looked at although they may be called, or are opaque."""


class PythonState:
    """What ``model`` keeps between its blocks that is not a tensor, and what ``closure`` refers to, as it is now.

    Attributes:
        why: What the model does if it has changed.
    """

    def __init__(self, model: nn.Module, closure: Callable[[], Any]):
        self.why: str | None = None
        self._random = process_states(all_devices=True)
        self._places: list[Place] = []
        self._known: dict[int, Any] = {}
        self._unknown: str | None = None
        self._levels: dict[int, int] = {}
        self._in_files = False
        self._classes: set[type] = set()
        self._variables: list[Place] = []
        with torch._C.DisableTorchFunctionSubclass():
            self._look(model, "the model", _LEVELS)
            self._look(closure, "the closure", 0)

    def check(self, ended: bool = False) -> None:
        """Raise :class:`~hf_offload.optimizers.mezo.pairs.UnfitError` if it has changed, or if some of it is of
        a kind that cannot be compared.
        """
        if self._unknown is not None:
            self.why = f"keeps {self._unknown}"
            raise UnfitError
        with torch._C.DisableTorchFunctionSubclass():
            for place in [*self._places, *(self._variables if ended else ())]:
                if place.is_changed():
                    self.why = f"changes {place.changed_name()}"
                    raise UnfitError
        if not are_equal(self._random, process_states(all_devices=True)):
            self.why = "draws random numbers"
            raise UnfitError

    def restore(self) -> None:
        """Put it back."""
        with torch._C.DisableTorchFunctionSubclass():
            for place in [*self._places, *self._variables]:
                place.restore()
        set_process_states(self._random)

    def _look(self, value: Any, name: str, levels: int) -> None:
        if isinstance(value, (Tensor, *PLAIN, type(None), types.ModuleType)) or type(value).__module__ == _TABLES:
            return
        if id(value) in self._known and levels <= self._levels.get(id(value), levels):
            return
        self._levels[id(value)] = levels
        self._known[id(value)] = value
        if isinstance(value, nn.Module):
            self._look_at_module(value, name, levels)
        elif isinstance(value, types.FunctionType):
            self._look_at_function(value, name, levels)
        elif isinstance(value, type):
            if not (self._in_files and value.__module__.startswith("transformers.")):  # tables of all models
                self._look_at_class(value)
        elif isinstance(value, contextvars.ContextVar):
            self._look_at_variable(value, name, levels)
        elif isinstance(value, BYTES):
            self._look_at_bytes(value, name)
        elif isinstance(value, KINDS):
            self._places.append(places.generator(name, value))
        elif (place := places.container(name, value)) is not None:
            self._look_into(place, name, levels)
            if not _is_of_library(type(value)):
                self._look_at_attributes(value, name, levels)
        elif isinstance(value, tuple):
            self._look_at_all(enumerate(value), name, levels)
        elif isinstance(value, weakref.ReferenceType):
            self._look(value(), name, levels)
        elif isinstance(value, _WRAPPERS):
            self._look_at_all([(part, getattr(value, part, None)) for part in _WRAPPED], name, levels)
        elif levels and not _is_opaque(value):
            self._look_at_object(value, name, levels - 1)

    def _look_into(self, place: Place, name: str, levels: int) -> None:
        self._places.append(place)
        self._look_at_all(place.items(), name, levels)

    def _look_at_all(self, items: Iterable[tuple[Any, Any]], name: str, levels: int) -> None:
        for key, value in items:
            self._look(value, f"{name}.{key}", levels)

    def _look_at_module(self, module: nn.Module, name: str, levels: int) -> None:
        self._places.append(places.names(name, vars(module)))
        for key in _HOOKS:
            self._look_at_hooks(vars(module)[key], f"{name}.{key}", levels)
        self._look_at_all([item for item in vars(module).items() if item[0] not in _UNSEEN], name, levels)
        self._look_at_class(type(module))

    def _look_at_hooks(self, hooks: dict[Any, Any], name: str, levels: int) -> None:
        """Passes that take turns have hooks of their own, which come and go."""

        def read() -> dict[Any, Any]:
            return {key: hook for key, hook in hooks.items() if not _is_of_library(hook)}

        def write(before: dict[Any, Any]) -> None:
            for key in read():
                del hooks[key]
            hooks.update(before)

        self._known[id(hooks)] = hooks
        self._places.append(Names(name, read, write))
        self._look_at_all(hooks.items(), name, levels)

    def _look_at_function(self, function: types.FunctionType, name: str, levels: int) -> None:
        file = str(function.__globals__.get("__name__"))
        if file.partition(".")[0] in _LIBRARIES:
            self._look_at_all(enumerate(function.__closure__ or ()), name, 0)
            return
        self._look_at_all(enumerate(function.__closure__ or ()), name, levels)
        self._look_at_all([("defaults", function.__defaults__), ("keywords", function.__kwdefaults__)], name, levels)
        self._look(vars(function), name, levels)
        if not self._in_files:
            self._look_at_file(function.__globals__)

    def _look_at_class(self, kind: type) -> None:
        for each in kind.__mro__:
            if _is_of_library(each) or each in self._classes:
                continue
            self._classes.add(each)
            self._known[id(each)] = each
            self._places.append(places.attributes(each))
            self._look_at_kept(vars(each).items(), each.__name__)
            self._look_at_file(vars(sys.modules[each.__module__]) if each.__module__ in sys.modules else None)

    def _look_at_file(self, names: dict[str, Any] | None) -> None:
        name = "" if names is None else str(names.get("__name__"))
        if names is None or id(names) in self._known or name.partition(".")[0] in _LIBRARIES:
            return
        self._known[id(names)] = names
        self._places.append(places.names(name, names))
        self._look_at_kept([item for item in names.items() if not item[0].startswith("__")], name)

    def _look_at_kept(self, items: Iterable[tuple[str, Any]], name: str) -> None:
        before, self._in_files = self._in_files, True
        self._look_at_all([item for item in items if _is_kept(item[1])], name, 1)
        self._in_files = before

    def _look_at_variable(self, variable: contextvars.ContextVar[Any], name: str, levels: int) -> None:
        """The other pass runs in a copy of the context, so a value that is there during a pass alone is not seen by it."""
        try:
            content = variable.get()
        except LookupError:  # it could not be put back
            self._give_up(name, variable)
            return
        self._variables.append(places.variable(name, variable))
        self._look(content, name, levels)

    def _look_at_bytes(self, value: Any, name: str) -> None:
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            self._look_into(places.elements(name, value), name, 0)
        elif isinstance(value, np.ndarray) and not value.flags.writeable:
            self._look(value.base, name, 0)
        elif places.size(value) > _MOST_BYTES:
            self._give_up(name, value)
        else:
            self._places.append(places.content(name, value))

    def _look_at_object(self, value: Any, name: str, levels: int) -> None:
        if isinstance(value, _FIXED):
            return
        at_any_time = isinstance(value, (threading.local, threading.Thread))  # other threads change it
        if at_any_time or not (self._look_at_attributes(value, name, levels) or _is_fixed(value)):
            self._give_up(name, value)

    def _look_at_attributes(self, value: Any, name: str, levels: int) -> bool:
        """Whether it can have some of its own."""
        if not _is_of_library(type(value)):
            self._look_at_class(type(value))
        has_names = isinstance(getattr(value, "__dict__", None), dict)
        if has_names:
            self._look_into(places.names(name, vars(value)), name, levels)
        slots = places.slots(name, value)
        if slots is not None:
            self._look_into(slots, name, levels)
        return has_names or slots is not None

    def _give_up(self, name: str, value: Any) -> None:
        self._unknown = self._unknown or f"{name}, of type {type(value).__qualname__}, which is not compared"


def _is_of_library(definition: Any) -> bool:
    return str(getattr(definition, "__module__", "")).partition(".")[0] in _LIBRARIES


def _is_kept(value: Any) -> bool:
    """Whether an attribute of a class, or a name of a file, may have state."""
    if isinstance(value, (type, types.ModuleType)):
        return False
    return isinstance(value, _KEPT) or not (callable(value) or _is_opaque(value))


def _is_opaque(value: Any) -> bool:
    if isinstance(value, (threading.local, queue.SimpleQueue)):
        return False
    return str(type(value).__module__).partition(".")[0] in _OPAQUE


def _is_fixed(value: Any) -> bool:
    """Whether it is of a kind that does not change: values that are equal have equal hashes."""
    return isinstance(value, _FIXED) or type(value) is object or type(value).__hash__ not in (object.__hash__, None)
