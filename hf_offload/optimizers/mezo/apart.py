"""Two passes that take turns may not leave anything to each other: what one would leave is found before the other sees it.

Note: what is looked at
    Tensors, wherever a model keeps them: each operation of a pass may read what this pass has made, and what was there before
    the step, and may write only what this pass has made (:class:`Apart`). Everything else, in front of each block: what
    modules, objects and containers on them, their classes with the functions in them, the files that define these, and what
    their hooks refer to have as attributes, slots, elements or bytes, context variables, and the states of generators
    (:class:`PythonState`). So a pass is given up before the other one runs on what it has changed, and what it has changed is
    put back. What may change and cannot be compared, such as an iterator, lets a model take two passes.

    What is not seen are Python numbers that a model keeps anywhere else between its blocks, such as in files or in objects of
    PyTorch, tensors written through an array of NumPy that is not kept, and kernels that read memory without an operation of
    PyTorch.
"""

import array
import collections
import contextvars
import ctypes
import functools
import operator
import queue
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_offload.optimizers.mezo.pairs import UnfitError, are_equal, random_states, set_random_states

_MADE_BY = "_hf_offload_pass"
"""On a storage: the pass that has made it."""

_COMMON = {"torch", "hf_offload", "accelerate", "numpy", "rich", "tqdm"}
_LIBRARIES = _COMMON | set(sys.stdlib_module_names) - {"types"}
"""What they keep does not change what a model computes."""
_OPAQUE = _COMMON | {
    *("_abc", "_io", "_thread", "_weakref", "abc", "ast", "asyncio", "concurrent", "datetime", "decimal", "enum"),
    *(
        "fractions",
        "importlib",
        "inspect",
        "io",
        "logging",
        "operator",
        "os",
        "pathlib",
        "re",
        "signal",
        "socket",
        "ssl",
    ),
    *("subprocess", "tempfile", "threading", "typing", "uuid", "warnings", "weakref", "zoneinfo"),
}
"""What their objects keep does not change what a model computes, or cannot change; those of other libraries are looked at."""
_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}
_SEEN = {"_buffers", "_modules"} | _HOOKS
_UNSEEN = set(vars(nn.Module())) - _SEEN
"""What PyTorch keeps on each module for other things than a forward."""
_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, frozenset, types.MethodType)
_LEVELS = 2
"""Of objects in objects that are looked at."""
_BYTES = (
    np.ndarray,
    array.array,
    bytearray,
    memoryview,
    ctypes._SimpleCData,
    ctypes.Array,
    ctypes.Structure,
    ctypes.Union,
)
_MOST_BYTES = 64 << 20
"""Of one array that is compared."""
_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property)
_FIXED = (
    *(types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType, types.CodeType),
    *(types.GenericAlias, types.MappingProxyType, types.FrameType, types.EllipsisType, types.NotImplementedType),
    *(types.UnionType, slice, range),
)
"""Types of what has no state of its own."""


class Apart(TorchDispatchMode):
    """The operations of one of two passes. One that reads what the other has made, or writes what was there before, ends the
    pass with :class:`~hf_offload.optimizers.mezo.pairs.UnfitError`, without having run.

    Args:
        other: The pass that runs first.

    Attributes:
        why: What the model does then.
    """

    supports_higher_order_operators = True

    def __init__(self, other: "Apart | None" = None) -> None:
        super().__init__()
        self.why: str | None = None
        self._drawn: dict[int, tuple[torch.Generator, Tensor]] = {}  # what they were before
        self._other = other

    def restore(self) -> None:
        """Put back the generators that the pass has drawn from."""
        for generator, state in self._drawn.values():
            generator.set_state(state)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions in a model stay compiled, and have the same bits."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            given = {id(storage): storage for one in _tensors((args, kwargs)) for storage in _storage_of(one)}
            makers = {getattr(storage, _MADE_BY, self) for storage in given.values()}
            if any(getattr(one, _MADE_BY, None) is not self for one in _tensors((args, kwargs)) if _has_parts(one)):
                self._give_up("keeps tensors that are not strided", func)
            if makers - {self}:
                self._give_up("leaves tensors of one pass to another one", func)
            if _written_by(func):
                for one in _written(func, args, kwargs):
                    if any(getattr(storage, _MADE_BY, None) is not self for storage in _storage_of(one)):
                        self._give_up("changes tensors in place that it keeps", func)
            generator = kwargs.get("generator")
            if generator is not None and id(generator) not in self._drawn:
                if self._other is not None and id(generator) in self._other._drawn:
                    self._give_up("draws from a generator that it keeps", func)
                self._drawn[id(generator)] = generator, generator.get_state()
            result = func(*args, **kwargs)
            for one in _tensors((result,)):
                if _has_parts(one):
                    setattr(one, _MADE_BY, self)
                for storage in _storage_of(one):
                    if id(storage) not in given:
                        setattr(storage, _MADE_BY, self)
        return result

    def _give_up(self, why: str, func: Any) -> None:
        self.why = f"{why} ({func})"
        raise UnfitError


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _storage_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def _has_parts(tensor: Tensor) -> bool:
    """Whether it is sparse, or of another layout whose parts are not seen."""
    return tensor.layout is not torch.strided


@functools.cache
def _written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operation writes."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    return tuple(
        (place, one.name)
        for place, one in enumerate(arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for place, name in _written_by(func):
        yield from _tensors((args[place] if place < len(args) else kwargs.get(name),))


class _Place:
    """Something that holds values: ``read`` gives them, ``write`` puts them back."""

    def __init__(self, name: str, read: Callable[[], list[Any]], write: Callable[[list[Any]], None]):
        self.name = name
        self.read = read
        self.write = write
        self.first = self.last = read()

    def is_changed(self) -> bool:
        """Whether something else than a tensor is another one, or a tensor has another shape."""
        now = self.read()
        if len(now) == len(self.last) and all(map(operator.is_, now, self.last)):
            return False
        if len(now) != len(self.first) or not all(map(_are_alike, now, self.first)):
            return True
        self.last = now
        return False

    def restore(self) -> None:
        """Let the values be what they were."""
        now = self.read()
        if len(now) != len(self.first) or not all(map(operator.is_, now, self.first)):
            self.write(self.first)

    def changed_name(self) -> str:
        """What has changed, in words."""
        now = self.read()
        names = now[: len(now) // 2]
        before = dict(zip(self.first[: len(self.first) // 2], self.first[len(self.first) // 2 :], strict=False))
        for name, value in zip(names, now[len(now) // 2 :], strict=False):
            if isinstance(name, str) and not (name in before and _are_alike(value, before[name])):
                return f"{self.name}.{name}"
        return self.name


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
    return isinstance(one, _VALUES) and bool(one == other)


class PythonState:
    """What ``model`` keeps between its blocks that is not a tensor, and what ``closure`` refers to, as it is now.

    Attributes:
        why: What the model does if it has changed.
    """

    def __init__(self, model: nn.Module, closure: Callable[[], Any]):
        self.why: str | None = None
        self._random = random_states()
        self._places: list[_Place] = []
        self._known: dict[int, Any] = {}
        self._unknown: str | None = None
        self._levels: dict[int, int] = {}
        self._in_files = False
        self._classes: set[type] = set()
        self._variables: list[_Place] = []
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
        if not are_equal(self._random, random_states()):
            self.why = "draws random numbers"
            raise UnfitError

    def restore(self) -> None:
        """Put it back."""
        with torch._C.DisableTorchFunctionSubclass():
            for place in [*self._places, *self._variables]:
                place.restore()
        set_random_states(self._random)

    def _look(self, value: Any, name: str, levels: int) -> None:
        if isinstance(value, (Tensor, *_VALUES[:-1], type(None), types.ModuleType)):
            return
        if id(value) in self._known and levels <= self._levels.get(id(value), levels):
            return
        self._levels[id(value)] = levels
        self._known[id(value)] = value
        if isinstance(value, nn.Module):
            self._look_at_module(value, name, levels)
        elif isinstance(value, dict):
            self._add_mapping(name, value)
            self._look_at_all(value.items(), name, levels)
        elif isinstance(value, (list, collections.deque)):
            self._places.append(_Place(name, functools.partial(list, value), functools.partial(_refill, value)))
            self._look_at_all(enumerate(value), name, levels)
        elif isinstance(value, set):
            self._places.append(_Place(name, lambda: [frozenset(value)], lambda old: _refill_set(value, old[0])))
        elif isinstance(value, tuple):
            self._look_at_all(enumerate(value), name, levels)
        elif isinstance(value, types.FunctionType):
            self._look_at_function(value, name, levels)
        elif isinstance(value, types.MethodType):
            self._look_at_all([("self", value.__self__), ("func", value.__func__)], name, levels)
        elif isinstance(value, functools.partial):
            self._look_at_all([("func", value.func), ("args", value.args), ("keywords", value.keywords)], name, levels)
        elif isinstance(value, types.CellType):
            self._places.append(_Place(name, lambda: _content(value), lambda old: _refill_cell(value, old)))
            self._look_at_all(enumerate(_content(value)), name, levels)
        elif (generator := _generator(value)) is not None:
            self._places.append(_Place(name, *generator))
        elif isinstance(value, type):
            if not (self._in_files and value.__module__.startswith("transformers.")):  # tables of all models
                self._look_at_class(value)
        elif isinstance(value, _BYTES):
            self._look_at_bytes(value, name)
        elif isinstance(value, contextvars.ContextVar):
            self._look_at_variable(value, name, levels)
        elif isinstance(value, _DESCRIPTORS):
            parts = ("__func__", "fget", "fset", "func")
            self._look_at_all([(part, getattr(value, part, None)) for part in parts], name, levels)
        elif levels and not _is_opaque(value):
            self._look_at_object(value, name, levels - 1)

    def _look_at_object(self, value: Any, name: str, levels: int) -> None:
        if isinstance(value, _FIXED):
            return
        slots = _slots(type(value))
        has_names = isinstance(getattr(value, "__dict__", None), dict)
        at_any_time = isinstance(value, (threading.local, threading.Thread))  # other threads change it
        if at_any_time or not (has_names or slots or _is_fixed(value)):
            self._give_up(name, value)
            return
        if not _is_of_library(type(value)):
            self._look_at_class(type(value))
        if has_names:
            self._add_mapping(name, vars(value))
            self._look_at_all(vars(value).items(), name, levels)
        if slots:

            def read() -> list[Any]:
                present = {key: slot.__get__(value) for key, slot in slots.items() if hasattr(value, key)}
                return [*present, *present.values()]

            self._places.append(_Place(name, read, lambda old: _refill_slots(value, slots, old)))
            self._look_at_all(_mapping(read()).items(), name, levels)

    def _look_at_bytes(self, value: Any, name: str) -> None:
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            self._places.append(_Place(name, lambda: list(value.flat), lambda old: _refill_array(value, old)))
            self._look_at_all(enumerate(value.flat), name, 0)
            return
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            self._look(value.base, name, 0)
        elif _size(value) > _MOST_BYTES:
            self._give_up(name, value)
        else:
            self._places.append(
                _Place(name, lambda: [_shape(value), _bytes(value)], lambda old: _refill_bytes(value, old[1]))
            )

    def _look_at_variable(self, variable: contextvars.ContextVar[Any], name: str, levels: int) -> None:
        """The other pass runs in a copy of the context, so a value that is there during a pass alone is not seen by it."""
        try:
            content = variable.get()
        except LookupError:  # it could not be put back
            self._give_up(name, variable)
            return
        self._variables.append(_Place(name, lambda: [variable.get()], lambda old: _set_variable(variable, old)))
        self._look(content, name, levels)

    def _give_up(self, name: str, value: Any) -> None:
        self._unknown = self._unknown or f"{name}, of type {type(value).__qualname__}, which is not compared"

    def _look_at_all(self, items: Iterable[tuple[Any, Any]], name: str, levels: int) -> None:
        for key, value in items:
            self._look(value, f"{name}.{key}", levels)

    def _look_at_module(self, module: nn.Module, name: str, levels: int) -> None:
        self._add_mapping(name, vars(module))
        for key in _HOOKS:
            self._add_hooks(f"{name}.{key}", vars(module)[key], levels)
        self._look_at_all([item for item in vars(module).items() if item[0] not in _UNSEEN], name, levels)
        self._look_at_class(type(module))

    def _add_hooks(self, name: str, hooks: dict[Any, Any], levels: int) -> None:
        """Passes that take turns have hooks of their own, which come and go."""

        def read() -> list[Any]:
            present = {key: hook for key, hook in hooks.items() if not _is_of_library(hook)}
            return [*present, *present.values()]

        def write(old: list[Any]) -> None:
            for key in read()[: len(read()) // 2]:
                del hooks[key]
            hooks.update(_mapping(old))

        self._known[id(hooks)] = hooks
        self._places.append(_Place(name, read, write))
        self._look_at_all(hooks.items(), name, levels)

    def _look_at_class(self, kind: type) -> None:
        for each in kind.__mro__:
            if _is_of_library(each) or each in self._classes:
                continue
            self._classes.add(each)
            self._known[id(each)] = each
            values: Any = vars(each)
            self._places.append(
                _Place(each.__name__, lambda v=values: [*v, *v.values()], functools.partial(_refill_class, each))  # type: ignore[misc]
            )
            self._look_at_kept(values.items(), each.__name__)
            self._look_at_file(vars(sys.modules[each.__module__]) if each.__module__ in sys.modules else None)

    def _look_at_file(self, names: dict[str, Any] | None) -> None:
        name = "" if names is None else str(names.get("__name__"))
        if names is None or id(names) in self._known or name.partition(".")[0] in _LIBRARIES:
            return
        self._known[id(names)] = names
        self._add_mapping(name, names)
        self._look_at_kept([item for item in names.items() if not item[0].startswith("__")], name)

    def _look_at_kept(self, items: Iterable[tuple[str, Any]], name: str) -> None:
        before, self._in_files = self._in_files, True
        self._look_at_all([item for item in items if _is_kept(item[1])], name, 1)
        self._in_files = before

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

    def _add_mapping(self, name: str, mapping: dict[Any, Any]) -> None:
        self._places.append(
            _Place(name, lambda: [*mapping, *mapping.values()], functools.partial(_refill_mapping, mapping))
        )


def _is_of_library(definition: Any) -> bool:
    return str(getattr(definition, "__module__", "")).partition(".")[0] in _LIBRARIES


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, set, collections.deque)) or _generator(value) is not None


def _is_kept(value: Any) -> bool:
    """Whether an attribute of a class, or a name of a file, may have state."""
    if isinstance(value, (type, nn.Module, types.ModuleType, types.MethodType)):
        return False
    kinds = (*_BYTES, *_DESCRIPTORS, types.FunctionType, contextvars.ContextVar, functools.partial)
    return _is_container(value) or isinstance(value, kinds) or not (callable(value) or _is_opaque(value))


def _is_opaque(value: Any) -> bool:
    if isinstance(value, (threading.local, queue.SimpleQueue)):
        return False
    return str(type(value).__module__).partition(".")[0] in _OPAQUE


def _is_fixed(value: Any) -> bool:
    """Whether it is of a kind that does not change: values that are equal have equal hashes."""
    return isinstance(value, _FIXED) or type(value) is object or type(value).__hash__ not in (object.__hash__, None)


def _slots(kind: type) -> dict[str, Any]:
    return {
        key: slot
        for each in reversed(kind.__mro__)
        if "__slots__" in vars(each)
        for key, slot in vars(each).items()
        if isinstance(slot, types.MemberDescriptorType)
    }


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


def _refill_slots(value: Any, slots: dict[str, Any], old: list[Any]) -> None:
    before = _mapping(old)
    for key, slot in slots.items():
        if key in before:
            slot.__set__(value, before[key])
        elif hasattr(value, key):
            slot.__delete__(value)


def _set_variable(variable: contextvars.ContextVar[Any], old: list[Any]) -> None:
    variable.set(old[0])


def _size(value: Any) -> int:
    if isinstance(value, array.array):
        return len(value) * value.itemsize
    return int(value.nbytes) if isinstance(value, (np.ndarray, memoryview)) else len(_bytes(value))


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


def _refill_array(value: Any, old: list[Any]) -> None:
    for place, one in enumerate(old):
        value.flat[place] = one


def _refill_cell(cell: types.CellType, old: list[Any]) -> None:
    if old:
        cell.cell_contents = old[0]
    else:
        del cell.cell_contents


def _refill_mapping(mapping: dict[Any, Any], old: list[Any]) -> None:
    before = _mapping(old)
    if list(mapping) != list(before):
        mapping.clear()
    mapping.update(before)


def _mapping(read: list[Any]) -> dict[Any, Any]:
    return dict(zip(read[: len(read) // 2], read[len(read) // 2 :], strict=True))


def _refill_class(kind: type, old: list[Any]) -> None:
    before = _mapping(old)
    for key in set(vars(kind)) - set(before):
        delattr(kind, key)
    for key, value in before.items():
        if vars(kind).get(key) is not value:
            setattr(kind, key, value)


def _generator(value: Any) -> tuple[Callable[[], list[Any]], Callable[[list[Any]], None]] | None:
    """How the state of a generator of random numbers is read and written; None for something else."""
    if isinstance(value, random.Random):
        return lambda: [value.getstate()], lambda old: value.setstate(old[0])
    if isinstance(value, np.random.RandomState):
        return lambda: [_frozen(value.get_state(legacy=False))], lambda old: value.set_state(_thawed(old[0]))
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return lambda: [_frozen(bits.state)], lambda old: setattr(bits, "state", _thawed(old[0]))
    return None


def _frozen(state: Any) -> Any:
    """The state of a generator of NumPy, as what can be compared."""
    if isinstance(state, dict):
        return tuple((key, _frozen(value)) for key, value in state.items())
    return (state.dtype.str, state.tobytes()) if isinstance(state, np.ndarray) else state


def _thawed(frozen: Any) -> Any:
    if not isinstance(frozen, tuple):
        return frozen
    if isinstance(frozen[0], str):
        return np.frombuffer(frozen[1], frozen[0])
    return {key: _thawed(value) for key, value in frozen}
