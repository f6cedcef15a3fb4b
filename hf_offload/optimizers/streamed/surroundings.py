"""What an optimizer's class keeps outside of its objects: in class attributes, globals and enclosing functions."""

import contextlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hf_offload.optimizers.streamed.contents import SHARED, Copying, NotCopied

_OF_THE_LIBRARY = ("torch", "builtins", "abc", "typing", "collections")


class Surroundings:
    """The values that methods of ``kind`` name, as far as Python says: not those that they find by a computed name, and not
    those in other modules. PyTorch's own classes have none that count.
    """

    def __init__(self, kind: type[Optimizer]):
        self._places: dict[tuple[int, str], tuple[Any, str]] = {}
        self._classes: list[type] = []
        self._seen: set[int] = set()
        for one in kind.__mro__:
            self._look_into_class(one)

    def present(self) -> dict[str, Any]:
        """The values, by what they are called."""
        return {f"{_name_of(owner)}{name}": _get(owner, name) for owner, name in self._all_places()}

    @property
    def may_change(self) -> bool:
        """Whether any of them can change: all but constants, by their names."""
        return any(
            isinstance(value, (int, float, complex)) and not isinstance(value, bool) and not name.isupper()
            if _is_atom_like(value)
            else True
            for owner, name in self._all_places()
            for value in [_get(owner, name)]
        )

    @contextlib.contextmanager
    def copied(self, itself: Optimizer, other: Any) -> Iterator[None]:
        """Inside, copies take their place: what cannot be copied is shared, unless a parameter, module or optimizer is in it.

        Raises :class:`~hf_offload.optimizers.streamed.contents.NotCopied`.
        """
        copying = Copying({id(itself): other})
        copies: list[tuple[Any, str, Any, Any]] = []
        before = self._all_places()
        for owner, name in before:
            value = _get(owner, name)
            try:
                made = copying.copy(value)
            except NotCopied as error:
                raise NotCopied(f"{name!r}, which its methods name, holds {error}") from None
            except Exception:
                made = value
            if made is not value or _is_atom_like(value):
                copies.append((owner, name, value, made))
        try:
            for owner, name, _, made in copies:
                _set(owner, name, made)
            yield
        finally:
            for owner, name, value, _ in copies:
                _set(owner, name, value)
            known = {(id(owner), name) for owner, name in before}
            for owner, name in self._all_places():
                if (id(owner), name) not in known:
                    delattr(owner, name)

    def _all_places(self) -> list[tuple[Any, str]]:
        of_classes = [
            (kind, name) for kind in self._classes for name, value in vars(kind).items() if _is_data(name, value)
        ]
        return [*self._places.values(), *of_classes]

    def _look_into_class(self, kind: type) -> None:
        if id(kind) in self._seen or (kind.__module__ or "").partition(".")[0] in _OF_THE_LIBRARY:
            return
        self._seen.add(id(kind))
        self._classes.append(kind)
        for value in list(vars(kind).values()):
            for function in _functions_in(value):
                self._look_into_function(function)

    def _look_into_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen or (function.__module__ or "").partition(".")[0] in _OF_THE_LIBRARY:
            return
        self._seen.add(id(function))
        for name in _names_in(function.__code__):
            if name in function.__globals__:
                self._look_into_value(function.__globals__, name, function.__globals__[name], function.__module__)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                self._look_into_value(cell, "", cell.cell_contents, function.__module__)

    def _look_into_value(self, owner: Any, name: str, value: Any, module: str) -> None:
        if isinstance(value, type):
            if value.__module__ == module:
                self._look_into_class(value)
            return
        functions = _functions_in(value)
        for each in functions:
            if each.__module__ == module:
                self._look_into_function(each)
        if not functions and _is_data(name, value):
            self._places.setdefault((id(owner), name), (owner, name))


def _is_data(name: str, value: Any) -> bool:
    kinds = (*SHARED, property, classmethod, staticmethod)
    if name.startswith("__") or isinstance(value, kinds) or inspect.isdatadescriptor(value):
        return False
    return isinstance(value, nn.Module) or not callable(value)


def _functions_in(value: Any) -> list[types.FunctionType]:
    """The functions in a class's entry: a method, also behind decorators, or those of a property."""
    if isinstance(value, property):
        return [each for part in (value.fget, value.fset, value.fdel) for each in _functions_in(part)]
    if isinstance(value, (classmethod, staticmethod)):
        return _functions_in(value.__func__)
    found = []
    while isinstance(value, types.FunctionType):
        found.append(value)
        value = getattr(value, "__wrapped__", None)
    return found


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _name_of(owner: Any) -> str:
    if isinstance(owner, types.CellType):
        return f"<cell {id(owner)}>"
    return f"{owner.__module__}.{owner.__qualname__}." if isinstance(owner, type) else f"{owner.get('__name__')}."


def _get(owner: Any, name: str) -> Any:
    if isinstance(owner, types.CellType):
        return owner.cell_contents
    return vars(owner).get(name) if isinstance(owner, type) else owner.get(name)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, type):
        setattr(owner, name, value)
    else:
        owner[name] = value


def _is_atom_like(value: Any) -> bool:
    """Whether only another binding changes it."""
    return isinstance(value, (type(None), bool, int, float, complex, str, bytes, tuple, frozenset))
