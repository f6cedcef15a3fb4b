"""Steps of classes that are not PyTorch's, Transformers' or bitsandbytes': what they may read and change.

Note: one rule for all of them
    A streamed step is many: one for each weight. So a step may change weights and their state, and nothing else; what it
    reads beyond them must be plain values, which it cannot change. This is read off the code and the values, before any of
    the code runs, so that trying the class on small parameters leaves no trace. Such a class then steps within ``step()``,
    with whole weights and all groups: what it reads is what it would have read in memory.
"""

import dis
import enum
import logging
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_offload.errors import OffloadConfigError, OffloadError

_KNOWN_CLASSES = ("torch.optim.", "transformers.optimization.", "bitsandbytes.optim.")
_LIBRARIES = {
    *("torch", "transformers", "bitsandbytes", "numpy", "math", "cmath", "typing", "typing_extensions", "collections"),
    *("functools", "itertools", "operator", "warnings", "logging", "abc", "contextlib", "dataclasses", "enum", "copy"),
    *("numbers", "builtins", "types"),
}
_NOT_IN_STEP = {
    *("__init__", "__new__", "state_dict", "load_state_dict", "zero_grad", "add_param_group", "train", "eval"),
    *("__repr__", "__str__", "__format__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"),
    *("__init_subclass__", "__class_getitem__", "__hash__", "__eq__", "__copy__", "__deepcopy__"),
}
_CHANGES = {
    **dict.fromkeys(
        ("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"), "random numbers"
    ),
    **dict.fromkeys(("bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_"), "random numbers"),
    **dict.fromkeys(("random", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"), "random numbers"),
    **dict.fromkeys(("poisson", "dropout", "svd_lowrank", "pca_lowrank", "manual_seed"), "random numbers"),
    **dict.fromkeys(("distributed", "all_reduce", "all_gather", "broadcast"), "other processes"),
    **dict.fromkeys(
        ("globals", "locals", "vars", "__dict__", "eval", "exec", "open", "input", "__import__"), "anything"
    ),
}
"""Names in code -> what they draw from, or can change, once more for each weight."""
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.layout)
_COMPARED_BYTES = 65_536
"""Changes of larger tensors are those that PyTorch counts."""
_ADDS_HOOKS = Optimizer.profile_hook_step(Optimizer.step).__code__
_OF_THE_BASE = {"step", "state", "param_groups", "defaults"}


def is_known(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Whether the code that computes the steps of ``optimizer``, of class ``kind``, is that of a known class."""
    if not _is_known_code(getattr(kind, "step", None)):
        return False
    for number, one in enumerate(kind.__mro__):
        bases = kind.__mro__[number + 1 :]
        if not f"{one.__module__}.".startswith(_KNOWN_CLASSES) and one.__module__ not in ("builtins", "typing"):
            named = [
                name for name in vars(one) if name not in _NOT_IN_STEP and _overrides(name, vars(one)[name], bases)
            ]
            if "__getattr__" in vars(one) or any(not _is_dunder(name) or callable(vars(one)[name]) for name in named):
                return False
    of_the_step = ((name, value) for name, value in _attributes(optimizer) if name not in _NOT_IN_STEP)
    return not any(callable(value) and hasattr(kind, name) for name, value in of_the_step)


def check_overrides(optimizer: Optimizer) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` if options are kept by the place of a parameter."""
    manager = vars(optimizer).get("mng")
    if manager is not None and any(
        getattr(manager, name, None) for name in ("module_weight_config_triple", "pid2config", "index2config")
    ):
        raise OffloadConfigError(
            f"bitsandbytes' GlobalOptimManager has options for single weights, which {type(optimizer).__name__} finds by "
            "their place: its state cannot be streamed. Use another optimizer, or optimizer='none'."
        )


class ChangedByStep(OffloadError):
    """A step has changed something that is not of the weight alone."""


class OwnStep:
    """The step of ``kind``, a class of ``optimizer`` that is not known.

    Raises :class:`~hf_offload.errors.OffloadConfigError` where it could read, or change, more than plain values and the
    weight's own state.

    Attributes:
        takes_closure: Whether a closure is called once, before anything else: as tried on small parameters.
    """

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer]):
        self.takes_closure = False
        self._name = kind.__name__
        self._seen: set[int] = set()
        self._places: list[tuple[Any, str]] = []
        self._owners: list[Any] = []
        self._modules: set[int] = set()
        if type(kind).__module__.partition(".")[0] not in ("builtins", "abc"):
            raise self._refusal(f"its class is made by {type(kind).__name__}")
        self.check(optimizer)
        self._names: set[str] = set()
        classes = [one for one in kind.__mro__ if not _is_of_a_library(one.__module__)]
        for one in classes:
            for name, value in vars(one).items():
                if name not in _NOT_IN_STEP:
                    self._look_in_class(one, name, value)
        for one in classes:
            for name in self._names & _NOT_IN_STEP & set(vars(one)) - {"__init__"}:
                self._look_in_class(one, name, vars(one)[name])

    def check(self, optimizer: Optimizer) -> None:
        """Raise :class:`~hf_offload.errors.OffloadConfigError` for attributes or options that are not plain values."""
        for name, value in _attributes(optimizer):
            if not (type(value) is Tensor or _is_atom(value)):
                raise self._refusal(f"its attribute {name!r} is {_a(value)}")
        for number, group in enumerate([*optimizer.param_groups, optimizer.defaults]):
            for name, value in group.items():
                if name not in ("params", "param_names") and not _is_plain(value):
                    raise self._refusal(f"{name!r} in its parameter group {number} holds {_a(value)}")

    def check_state(self, optimizer: Optimizer, made: Mapping[str, set[Any]]) -> None:
        """Raise :class:`~hf_offload.errors.OffloadConfigError` for state that is not such as steps have ``made`` it."""
        for parameter, state in dict.items(optimizer.state):
            if not isinstance(parameter, Tensor):
                raise self._refusal(f"it keeps {str(parameter)[:80]!r} in its state, for all parameters together")
            for name, value in state.items():
                if name not in made or (isinstance(value, (bool, str, type(None))) and value not in made[name]):
                    raise self._refusal(f"its state was given {name!r} in another place than its step")

    def present(self) -> list[Any]:
        """What the code finds outside of the optimizer, as it is now."""
        found = [_value(owner, name) for owner, name in self._places]
        return found + [dict(vars(owner)) for owner in self._owners]

    def unlike(self, before: list[Any]) -> str | None:
        """What has another value than in ``before``, which :attr:`present` was."""
        for (owner, name), value in zip(self._places, before, strict=False):
            if _value(owner, name) is not value:
                return name
        for owner, values in zip(self._owners, before[len(self._places) :], strict=True):
            now = dict(vars(owner))
            for name in {**values, **now}:
                if now.get(name, owner) is not values.get(name, owner):
                    return f"{owner.__name__}.{name}"
        return None

    def restore(self, before: list[Any]) -> None:
        """Let all of it be as it was :attr:`present`."""
        for (owner, name), value in zip(self._places, before, strict=False):
            if _value(owner, name) is not value:
                _put(owner, name, value)
        for owner, values in zip(self._owners, before[len(self._places) :], strict=True):
            for name, value in dict(vars(owner)).items():
                if name not in values:
                    delattr(owner, name)
                elif values[name] is not value:
                    setattr(owner, name, values[name])

    # -- code -----------------------------------------------------------------------------------------------------------

    def _look_in_class(self, kind: type, name: str, value: Any) -> None:
        where = f"{kind.__name__}.{name}"
        if isinstance(value, types.MemberDescriptorType) and issubclass(kind, Optimizer):
            raise self._refusal(f"it keeps {name!r} in a slot")
        functions = _functions_in(value)
        for function in functions:
            self._look(function, where)
        if isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)) or functions:
            self._own(kind)
        elif not _is_dunder(name) and name != "_abc_impl":
            self._own(kind)
            self._look(value, where)

    def _look(self, value: Any, where: str) -> None:
        """Raise :class:`~hf_offload.errors.OffloadConfigError` for what is not plain, or code that refers to it."""
        if _is_atom(value) or isinstance(value, logging.Logger) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, (tuple, frozenset)):
            for each in value:
                self._look(each, where)
        elif isinstance(value, types.ModuleType):
            self._look_at_module(value, where)
        elif isinstance(value, types.FunctionType):
            self._look_at_function(value, where)
        elif isinstance(value, type):
            self._look_at_class(value)
        elif not _is_stateless(value):
            raise self._refusal(f"its code names {where!r}, which is {_a(value)}")

    def _look_at_module(self, module: types.ModuleType, where: str) -> None:
        if module.__name__.startswith("torch.distributed"):
            raise self._refusal(f"its code names {where!r}, by which it reaches other processes")
        self._seen.discard(id(module))  # other code may name other things in it
        if not _is_of_a_library(module.__name__) and id(module) not in self._modules:
            self._modules.add(id(module))
            for name in self._names & set(vars(module)):
                self._note(vars(module), name)
                self._look(vars(module)[name], f"{module.__name__}.{name}")
            self._modules.discard(id(module))

    def _look_at_class(self, kind: type) -> None:
        for one in kind.__mro__:
            if not _is_of_a_library(one.__module__) and not issubclass(one, (enum.Enum, BaseException)):
                for name, value in vars(one).items():
                    if not (issubclass(one, tuple) and not _functions_in(value)):
                        self._look_in_class(one, name, value)

    def _look_at_function(self, function: types.FunctionType, where: str) -> None:
        if hasattr(function, "_torchdynamo_orig_callable"):
            raise self._refusal(f"its code names {where!r}, which is compiled for the shapes that it is called with")
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if _is_of_a_library(function.__globals__.get("__name__") or ""):  # around one of the user's
            inside = [getattr(function, "__wrapped__", None), *(_content(cell) for cell in cells.values())]
            for each in inside:
                if isinstance(each, types.FunctionType):
                    self._look(each, where)
            return
        self._own(function)
        for value in [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]:
            self._look(value, f"a default of {where}")
        codes = list(_codes_in(function.__code__))
        self._names |= {name for code in codes for name in code.co_names}
        for code in codes:
            for name in code.co_names:
                if name in _CHANGES:
                    raise self._refusal(f"{where} names {name!r}, by which it reaches {_CHANGES[name]}")
        for instruction in [each for code in codes for each in dis.get_instructions(code)]:
            operation, name = instruction.opname, instruction.argval
            if operation in ("STORE_GLOBAL", "DELETE_GLOBAL") or (operation == "STORE_DEREF" and name in cells):
                raise self._refusal(f"{where} changes {name!r}, for all parameters together")
            if operation == "IMPORT_NAME" and not _is_of_a_library(name):
                raise self._refusal(f"{where} imports {name!r} when it runs")
            if operation in ("LOAD_GLOBAL", "LOAD_NAME") and name in function.__globals__:
                self._note(function.__globals__, name)
                self._look(function.__globals__[name], name)
            elif operation in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in cells:
                self._note(cells[name], name)
                self._look(_content(cells[name]), name)

    def _note(self, owner: Any, name: str) -> None:
        self._places.append((owner, name))

    def _own(self, owner: Any) -> None:
        if all(owner is not each for each in self._owners):
            self._owners.append(owner)

    def _refusal(self, why: str) -> OffloadConfigError:
        return OffloadConfigError(
            f"{self._name} is not a class of PyTorch's, and {why}: its step may depend on more than a weight, its gradient "
            "and plain values, or change it, so its state cannot be streamed. Keep plain numbers there, use another "
            "optimizer, or set optimizer='none'."
        )


def captured(value: Any) -> Any:
    """A copy of an option, as deep as lists, tuples and dictionaries go; tensors are cloned."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(captured, value))
    return {name: captured(each) for name, each in value.items()} if type(value) is dict else value


def values_in(value: Any) -> Any:
    """What is equal for options or attributes as long as no step changes them."""
    if isinstance(value, Tensor):
        small = value.is_cpu and value.layout == torch.strided and value.nbytes <= _COMPARED_BYTES
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if small else None
        return id(value), value._version, bits
    if isinstance(value, Mapping):
        return [(name, values_in(each)) for name, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value), *map(values_in, value)]
    return type(value), repr(value)


def _attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The attributes that are not those of any optimizer."""
    for name, value in vars(optimizer).items():
        if name not in _OF_THE_BASE and not (name.startswith("_optimizer_") and name.endswith("_hooks")):
            yield name, value


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_known_code(step: Any) -> bool:
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    module = getattr(step, "__globals__", {}).get("__name__", "")
    return f"{module}.".startswith(_KNOWN_CLASSES)


def _overrides(name: str, value: Any, bases: Sequence[type]) -> bool:
    """Whether ``value``, of a class with these ``bases``, is in the place of one of theirs."""
    if not any(name in vars(base) for base in bases):
        return False
    inherited = next(vars(base)[name] for base in bases if name in vars(base))
    # PyTorch wraps the step of a class for hooks when it is first made, also where that is inherited.
    adds_hooks = getattr(value, "__code__", None) is _ADDS_HOOKS
    return not (adds_hooks and value.__wrapped__ in (inherited, getattr(inherited, "__wrapped__", None)))


def _is_of_a_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _is_atom(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return type(value) in (tuple, frozenset, torch.Size) and all(map(_is_atom, value))
    return type(value) in _ATOMS


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_atom(name) and _is_plain(each) for name, each in value.items())
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else type(value) is Tensor or _is_atom(value)


def _is_stateless(value: Any) -> bool:
    """Whether it is a function of C, an operation, or a mere type."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    if isinstance(value, (types.MethodDescriptorType, types.WrapperDescriptorType, torch.jit.ScriptFunction)):
        return True
    return isinstance(value, (types.GenericAlias, types.UnionType)) or type(value).__module__ in (
        "typing",
        "torch._ops",
    )


def _functions_in(value: Any) -> list[types.FunctionType]:
    """The functions in an entry of a class."""
    if isinstance(value, property):
        return [each for part in (value.fget, value.fset, value.fdel) for each in _functions_in(part)]
    if isinstance(value, (classmethod, staticmethod)):
        return _functions_in(value.__func__)
    return [value] if isinstance(value, types.FunctionType) else []


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _value(owner: Any, name: str) -> Any:
    return _content(owner) if isinstance(owner, types.CellType) else owner.get(name)


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    else:
        owner[name] = value


def _a(value: Any) -> str:
    kind = "a parameter" if isinstance(value, nn.Parameter) else f"of type {type(value).__name__}"
    return f"{kind}, which is not a plain value"
