"""What the code of a block reaches, and the state of that. Looking changes nothing.

Note: how far a look goes
    From the block's modules, their hooks and their classes, it follows attributes, elements, closures, defaults, bound
    methods, partial functions, weak references, and globals that code names, through objects and functions of the user's.

    A module outside of the block, such as one that a hook records into or the model itself, is looked at as well, but it may
    lead to all of the model. So only those of its methods and children are looked at that the code reached so far names. For
    what a block's own forward changes, all of its attributes are compared; for what changes between forward and backward,
    those that this code names, since a block does not read the others, and the rest of the model may set them meanwhile.

Note: what cannot be looked into
    Code may name and hold anything: objects whose attributes raise, and that are not of the class that they say they are.
    A look at those, and at what is in TorchScript, ends as one that found something that changes always: their block is not
    recomputed. Training does not notice.
"""

import array
import collections
import contextvars
import dataclasses
import functools
import itertools
import logging
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_offload import generators
from hf_offload.tensors import bytes_of, can_be_followed, can_be_read

MOST_OBJECTS = 5_000
"""How many objects are looked into; what reaches more counts as changed."""
MOST_LEVELS = 6
"""How deep objects in objects are looked into."""
# Tensors up to this size are compared by value, too: some kernels write without raising the version.
_SMALL_BYTES = 1 << 20

PLAIN = (bool, int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device, torch.Size, torch.layout)
"""Types of what has no state, and is compared by value."""
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
# Their attributes are torch's own business, or that of a log.
_OPAQUE = (types.ModuleType, logging.Logger)
_ITERATORS = (
    *map(type, map(iter, ([], (), "", {}, {}.values(), {}.items(), set(), range(0)))),  # type: ignore[call-overload]
    *(enumerate, filter, map, zip, itertools.chain, itertools.cycle, itertools.islice, itertools.repeat),
)
# Of a class, around what is called.
_METHODS = (staticmethod, classmethod, functools.partialmethod, functools.cached_property)
# Autograd cannot leave it early, as a recompute does, and what it saves depends on how often it has run.
_SCRIPTS = (torch.jit.ScriptFunction, torch.jit.ScriptModule)
# What every module has; hooks are looked at one by one.
_OF_MODULES = frozenset(vars(nn.Module())) - {"_buffers", "_parameters", "training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_CHECKPOINTING = frozenset({"gradient_checkpointing", "_gradient_checkpointing_func"})
# They lead to children that code does not name.
_WALKS = frozenset({"modules", "named_modules", "children", "named_children", "apply", "get_submodule", "_modules"})
# Methods of modules that a forward does not run, although code names them.
_BEFORE = frozenset({"__init__", "__init_subclass__", "__new__", "__setstate__", "__deepcopy__", "__repr__"})
# Methods that run without being named.
_IMPLICIT = frozenset({"forward", "setup_context"})
_LIBRARIES = frozenset({"hf_offload", "torch", "transformers"})
UNKNOWN = "what cannot be looked into"
"""The name under which that is found, in every look."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Read:
    """A parameter when it was read. ``key`` is its id."""

    key: int
    version: int
    requires_grad: bool


def read_parameter(name: str, parameter: nn.Parameter) -> dict[str, Read]:
    """A parameter by its name; nothing where sharding may put another one in its place."""
    if type(parameter) is not nn.Parameter and may_be_sharded():
        return {}
    return {name: Read(id(parameter), parameter._version, parameter.requires_grad)}


def may_be_sharded() -> bool:
    """Whether there are several processes that could share parameters."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class Look:
    """One look at ``block`` and what it reaches. With ``values``, for what its forward changes, else for what it reads.

    Attributes:
        found: Name -> something that equals what is found by that name in the same state.
    """

    def __init__(self, block: nn.Module, values: bool):
        self.found: dict[str, Any] = {}
        self._block = block
        self._values = values
        self._inside = {id(module) for module in block.modules()}
        self._outside: dict[int, tuple[str, nn.Module]] = {}
        self._kinds: dict[type, frozenset[str]] = {}  # classes of what is outside, and methods that no block runs
        self._attributes: set[tuple[type, str]] = set()  # of classes of what is outside
        self._bases: set[type] = set()  # of the block's own modules
        self._prefixes: set[str] = set()
        self._seen: dict[int, Any] = {}  # kept, so that no id is used again
        self._codes: set[tuple[int, int]] = set()
        self._functions: list[types.FunctionType] = []  # whose globals are to be looked at
        self._globals: set[tuple[int, int | str]] = set()
        self._names: set[str] = set()  # that code has, or strings, which may be names of attributes

    def at(self, inputs: object) -> dict[str, Any]:
        """What is found, with a call of the block with ``inputs``. To be called once."""
        self.found[UNKNOWN] = []
        try:
            self._look(inputs)
        except Exception as error:
            logger.debug("A %s cannot be looked into.", type(self._block).__name__, exc_info=True)
            self._cannot_look(error)
        return self.found

    def _cannot_look(self, why: object) -> None:
        self.found[UNKNOWN].append((str(why), Same(object())))  # not even equal to that of another look

    def _look(self, inputs: object) -> None:
        found = self.found
        found["an input"] = self._token(inputs)
        classes: dict[type, str] = {}
        for name, module in self._block.named_modules():
            if isinstance(module, _SCRIPTS):
                self._cannot_look("TorchScript")
                continue
            prefix = f"{name}." if name else ""
            classes.setdefault(type(module), f"{type(module).__name__}.")
            for key, value in vars(module).items():
                if key in ("_buffers", "_parameters"):
                    found |= {f"{prefix}{one}": self._token(tensor) for one, tensor in value.items()}
                elif key not in _OF_MODULES and key not in _CHECKPOINTING:
                    found[f"{prefix}{key}"] = self._token(value)
            if name:  # the block's own hooks do not run in a recompute
                self._look_at_hooks(prefix, *(vars(module)[key] for key in _HOOKS))
        everyones = nn.modules.module
        self._look_at_hooks("every module's ", everyones._global_forward_pre_hooks, everyones._global_forward_hooks)
        for cls, prefix in classes.items():
            self._look_at_class(cls, prefix)
        self._look_outside()
        found["Python's random numbers"], found["NumPy's random numbers"] = generators.python_and_numpy()

    def _look_at_hooks(self, prefix: str, *hooks: Any) -> None:
        users = [hook for each in hooks for hook in each.values() if not _is_torchs(_definition(hook))]
        self.found[f"{prefix}hooks"] = [self._token(hook) for hook in users]
        for hook in users:
            self._look_at_code(*_functions(hook))

    def _look_at_class(self, cls: type, prefix: str) -> None:
        """One of the block's own."""
        for base in cls.__mro__:
            if not _is_of_library(base):
                self._bases.add(base)
                for key, value in vars(base).items():
                    if key not in _BEFORE:
                        self._look_at_attribute(f"{prefix}{key}", value, key)

    def _look_at_attribute(self, name: str, value: Any, key: str) -> None:
        """Of a class."""
        functions = _functions(value)
        for function in functions:
            self._add(name, function)
        self._look_at_code(*functions)
        looked_at = (
            _is_state(value) or isinstance(value, (*_METHODS, property, *_SCRIPTS)) or _is_users(type(value).__module__)
        )
        if not functions and not key.startswith("__") and looked_at:
            self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        """Under a name of its own: classes and files may have the same names."""
        token = self._token(value)
        names = (name if number == 1 else f"{name} ({number})" for number in itertools.count(1))
        self.found[next(one for one in names if one not in self.found)] = token

    def _look_outside(self) -> None:
        """What code names may lead to other code, that names more."""
        before = None
        while before != (now := (len(self._codes), len(self._names), len(self._outside), len(self._kinds))):
            before = now
            while self._functions:
                self._look_at_names(self._functions.pop())
            for prefix, module in list(self._outside.values()):
                self._look_at_module(prefix, module)
            for kind, unused in list(self._kinds.items()):
                self._look_at_kind(kind, unused)

    def _look_at_module(self, prefix: str, module: nn.Module) -> None:
        """One that is not in the block."""
        is_around = _contains(module, self._block)
        self._kinds.setdefault(type(module), _BEFORE | {"forward"} if is_around else _BEFORE)
        # torch's own classes name what no look finds.
        names = None if self._values or _is_of_library(type(module)) else self._names
        for key, value in list(vars(module).items()):
            if key == "_parameters":
                for one, parameter in value.items():
                    if parameter is not None and (names is None or one in names):
                        self.found |= read_parameter(f"{prefix}{one}", parameter)
            elif key == "_buffers":
                self._look_at_some(prefix, value, names)
            elif key == "_modules":
                walked = _is_of_library(type(module)) or not _WALKS.isdisjoint(self._names)
                for one, child in value.items():
                    if child is not None and (walked or one in self._names):
                        self._token(child)
            elif key not in _OF_MODULES and key not in _CHECKPOINTING and not (is_around and key == "forward"):
                self._look_at_some(prefix, {key: value}, names)
        if not is_around and f"{prefix}hooks" not in self.found:
            self._look_at_hooks(prefix, *(vars(module)[key] for key in _HOOKS))

    def _look_at_some(self, prefix: str, values: dict[str, Any], names: set[str] | None) -> None:
        for key, value in values.items():
            if (names is None or key in names) and f"{prefix}{key}" not in self.found:
                self.found[f"{prefix}{key}"] = self._token(value)

    def _look_at_kind(self, kind: type, unused: frozenset[str]) -> None:
        """The class of something outside, or one that code names."""
        for base in kind.__mro__:
            of_library = _is_of_library(base) or base.__module__.partition(".")[0] in sys.stdlib_module_names
            if of_library or base in self._bases:
                continue
            for key, value in list(vars(base).items()):
                if key in unused or (base, key) in self._attributes:
                    continue
                named = key in self._names or key in _IMPLICIT or key.startswith("__")
                if named or (self._values and not _functions(value)):
                    self._attributes.add((base, key))
                    self._look_at_attribute(f"{base.__name__}.{key}", value, key)

    def _look_at_code(self, *functions: types.FunctionType) -> None:
        """Of what decorators have wrapped, which may be anything that can be called: as an object, it is looked at as a part
        of its wrapper.
        """
        for function in functions:
            for wrapped in _functions(_unwrapped(function)):
                self._look_at_globals(wrapped)

    def _look_at_globals(self, function: types.FunctionType) -> None:
        known = id(function.__code__), id(function.__globals__)
        if known not in self._codes:
            self._codes.add(known)
            self._functions.append(function)  # not at once, as functions lead to functions without end

    def _look_at_names(self, function: types.FunctionType) -> None:
        names = _names_in(function.__code__)
        self._names.update(names)
        for name in names:
            if name in function.__globals__:
                self._look_at_global(name, function.__globals__, str(function.__module__), names)
            elif name in sys.modules:  # imported where it is used
                self._look_at_global(name, sys.modules, str(function.__module__), names)

    def _look_at_global(self, name: str, values: dict[str, Any], where: str, names: tuple[str, ...]) -> None:
        """One of ``values`` that a function of the module ``where`` names."""
        value = values[name]
        is_module = isinstance(value, types.ModuleType)
        known = (id(value), id(names)) if is_module else (id(values), name)
        if known in self._globals:
            return
        self._globals.add(known)
        if is_module:
            if _is_users(value.__name__):
                for attribute in names:
                    if attribute in vars(value):
                        self._look_at_global(attribute, vars(value), value.__name__, names)
        elif isinstance(value, types.FunctionType):
            if value.__module__ == where or _is_users(_defined_in(value)):
                self._add(f"the global {name}", value)
                self._look_at_code(value)
        elif _is_state(value) or _is_users(where) or _is_users(type(value).__module__):
            self._add(f"the global {name}", value)

    def _token(self, value: Any, levels: int = MOST_LEVELS) -> Any:
        """Something that equals the token of the same value in the same state."""
        if type(value) in (weakref.ProxyType, weakref.CallableProxyType):
            value = _behind(value)
        if type(value) is types.MappingProxyType:
            return self._token(dict(value), levels) if levels else None  # which proxy it is says nothing
        if isinstance(value, PLAIN):
            if isinstance(value, str):
                self._names.add(value)
            if _is_users(type(value).__module__):  # a comparison of the user's need not give a bool
                return Same(value)
            return (value,)  # as part of a tuple, NaN equals itself
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, _SCRIPTS):
            self._cannot_look("TorchScript")
            return Same(value)
        if isinstance(value, generators.KINDS):
            if generators.is_python_or_numpy(value):
                return Same(value)  # what they draw is compared by itself
            state = generators.state_of(value)
            return state.tolist() if isinstance(state, torch.Tensor) else state
        if isinstance(value, itertools.count):
            return repr(value)
        if isinstance(value, nn.Module):
            self._reach(value)
            return Same(value)
        if isinstance(value, type):
            if _is_users(value.__module__):
                self._kinds.setdefault(value, frozenset())
            return Same(value)
        if isinstance(value, _OPAQUE) or levels == 0:
            return Same(value)
        if id(value) in self._seen:
            return Same(value)
        if len(self._seen) > MOST_OBJECTS:
            self.found[f"one of more than {MOST_OBJECTS:,} objects"] = Same(object())
            return Same(value)
        self._seen[id(value)] = value
        if isinstance(value, dict):
            items = [(self._token(key, levels - 1), self._token(one, levels - 1)) for key, one in list(value.items())]
            return items if type(value) is dict else (items, self._token(getattr(value, "__dict__", None), levels - 1))
        if isinstance(value, _CONTAINERS):
            elements = [self._token(one, levels - 1) for one in list(value)]
            own = getattr(value, "__dict__", None)
            return (elements, self._token(own, levels - 1)) if own else elements
        if isinstance(value, contextvars.ContextVar):
            # A recompute runs in the context of its forward, but it is looked at in that of backward.
            return (Same(value), self._token(value.get(None), levels - 1) if self._values else None)
        if isinstance(value, types.FunctionType) and _is_users(str(value.__globals__.get("__name__"))):
            self._look_at_globals(value)
        elif _is_users(type(value).__module__):
            self._kinds.setdefault(type(value), frozenset())
        return (Same(value), [self._token(one, levels - 1) for one in _parts(value)])

    def _reach(self, module: nn.Module) -> None:
        if id(module) in self._inside or id(module) in self._outside:
            return
        kind = type(module).__name__
        prefixes = (f"{kind}." if number == 1 else f"{kind} ({number})." for number in itertools.count(1))
        prefix = next(one for one in prefixes if one not in self._prefixes)
        self._prefixes.add(prefix)
        self._outside[id(module)] = prefix, module

    def _tensor(self, tensor: torch.Tensor) -> Any:
        version = tensor._version if can_be_followed(tensor) else None
        if not self._values or not can_be_read(tensor) or tensor.nbytes > _SMALL_BYTES:
            return (Same(tensor), version)
        return (Same(tensor), version, bytes_of(tensor).tobytes())


def _is_state(value: Any) -> bool:
    return isinstance(value, (*PLAIN, *_CONTAINERS, torch.Tensor, nn.Module, *generators.KINDS))


def _parts(value: Any) -> Iterator[Any]:
    """What a function or an object of a class of the user's holds."""
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, weakref.ReferenceType):
        yield value()
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        if _top(_defined_in(value)) not in _LIBRARIES:
            for cell in value.__closure__ or ():
                try:
                    yield cell.cell_contents
                except ValueError:  # nothing is in it yet
                    continue
            yield from (one for one in (value.__defaults__, value.__kwdefaults__, vars(value)) if one)
    elif isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        yield from () if frame is None else (frame.f_lasti, dict(frame.f_locals))
    elif isinstance(value, _ITERATORS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield value.__reduce__()
    elif isinstance(value, (bytearray, array.array)):
        yield bytes(value)
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        yield value.tolist() if value.dtype.hasobject else value.tobytes()
    elif isinstance(value, (*_METHODS, property)):
        yield [getattr(value, name, None) for name in ("__func__", "func", "fget", "fset")]
    elif not _is_torchs(type(value).__module__):
        yield getattr(value, "__dict__", None)
        for cls in type(value).__mro__:
            for slot in vars(cls).values() if "__slots__" in vars(cls) else ():
                if isinstance(slot, types.MemberDescriptorType):
                    try:
                        yield slot.__get__(value)
                    except AttributeError:  # nothing is in it yet
                        continue


def _functions(value: Any) -> tuple[types.FunctionType, ...]:
    """Those that an attribute of a class, or a hook, runs."""
    if isinstance(value, types.FunctionType):
        return (value,)
    if isinstance(value, property):
        return _functions(value.fget) + _functions(value.fset)
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        return _functions(value.__func__)
    if isinstance(value, (functools.partial, functools.partialmethod, functools.cached_property)):
        return _functions(value.func)
    if isinstance(value, functools._lru_cache_wrapper):
        return _functions(value.__wrapped__)
    return ()


def _unwrapped(function: Any) -> Any:
    """What a function was made of, as far as functions lead to it."""
    seen: set[int] = set()
    while isinstance(function, types.FunctionType) and id(function) not in seen:
        seen.add(id(function))
        function = vars(function).get("__wrapped__", function)
    return function


def _definition(hook: Any) -> str:
    """The module that defines what a hook runs."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    if isinstance(hook, types.MethodType):
        hook = hook.__self__
    return _defined_in(hook) if isinstance(hook, types.FunctionType) else str(type(hook).__module__)


def _defined_in(function: types.FunctionType) -> str:
    """A decorated function says where what it was made of is defined; the decorator may be a library's, or that may be."""
    names = str(function.__module__), str(function.__globals__.get("__name__"))
    return next((name for name in names if _top(name) not in _LIBRARIES), names[0])


@functools.cache
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names and strings in a function and in the functions that it defines."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            names[constant] = None
        elif isinstance(constant, types.CodeType):
            names |= dict.fromkeys(_names_in(constant))
    return tuple(names)


def _contains(module: nn.Module, block: nn.Module) -> bool:
    modules, seen = [module], set()
    while modules:
        one = modules.pop()
        if one is block:
            return True
        if id(one) not in seen:
            seen.add(id(one))
            modules.extend(child for child in one._modules.values() if child is not None)
    return False


def _behind(proxy: Any) -> Any:
    try:
        classes = getattr(proxy, "__mro__", None)  # of a class
        return classes[0] if classes else proxy.__repr__.__self__
    except ReferenceError:
        return None


def _is_torchs(module: str) -> bool:
    return _top(module) in ("torch", "hf_offload")


def _is_of_library(cls: type) -> bool:
    return _top(cls.__module__) in ("builtins", "torch", "hf_offload")


def _top(module: Any) -> str:
    """The package that a module is in."""
    return str(module).partition(".")[0]


@functools.cache
def _is_users(name: Any) -> bool:
    """Whether the module of that name is neither of a library nor of Python's."""
    name = str(name)
    module = sys.modules.get(name)
    file = str(getattr(module, "__file__", None) or "")
    top = name.partition(".")[0]
    if top == "__main__":  # of a notebook, there is no file
        return True
    return bool(file) and top not in sys.stdlib_module_names | _LIBRARIES and "site-packages" not in file


class Same:
    """Equal to another one of the same living object. Does not keep it, where that is possible."""

    __slots__ = ("_get",)

    def __init__(self, value: Any):
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        mine = self._get()
        return isinstance(other, Same) and mine is not None and mine is other._get()

    __hash__ = None  # type: ignore[assignment]
