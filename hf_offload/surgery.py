"""Changing single objects for a while: another forward, another class, and hooks that do nothing in copies.

Note: copies of a changed model
    A model is copied, or pickled, with all that was put on it. Another forward and another class belong to the module and go
    with it: the copy computes what the original does. Hooks belong to the session of the original: in a copy they would
    measure, offload and unwind on its behalf, and what they hold often cannot be pickled.
"""

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")


class Undo(Generic[T]):
    """Takes a change back, as the handle of a hook does. Holds nothing of what was changed."""

    def __init__(self, target: T, take_back: Callable[[T], None]):
        self._target = weakref.ref(target)
        self._take_back = take_back

    def remove(self) -> None:
        """Take it back, if what was changed is still there."""
        target = self._target()
        if target is not None:
            self._take_back(target)


class ReplacedForward(ABC):
    """Puts :meth:`forward` in the place of a module's own; ``name`` is the module's.

    It lives as long as the module does, which holds it for its forward.
    """

    def __init__(self, name: str, module: nn.Module):
        self.name = name
        self.module = module
        self.own_forward: Any = None
        self._was_there = False

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module does instead; ``own_forward`` is what it did."""

    def install(self) -> Undo["ReplacedForward"]:
        """Replace the module's forward. Its hooks stay as they are."""
        # accelerate puts its own there, too.
        self._was_there = "forward" in self.module.__dict__
        self.own_forward = self.module.forward
        self.module.forward = self.forward
        return Undo(self, ReplacedForward._put_back)

    def _put_back(self) -> None:
        if self._was_there:
            self.module.forward = self.own_forward
        else:
            self.module.__dict__.pop("forward", None)


def swap_class(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> Undo[nn.Module]:
    """Make ``module`` one of ``kind``, a subclass of its class, with these attributes, neither parameters nor buffers.

    Its parameters, its hooks and its place in the state dict stay, and it is an instance of its own class still.
    """
    usual = type(module)
    module.__class__ = kind
    vars(module).update(attributes)
    return Undo(module, functools.partial(_swap_back, kind, usual, tuple(attributes)))


def _swap_back(kind: type, usual: type, attributes: tuple[str, ...], target: object) -> None:
    if type(target) is kind:
        target.__class__ = usual
    for attribute in attributes:
        vars(target).pop(attribute, None)


def extend(target: T, before: type | None, behind: type | None = None) -> Undo[T]:
    """Give ``target`` alone the methods of ``before``, which come before those of its class and reach them by ``super()``.

    Those of ``behind``, a subclass of the last class of the target's own that has them, come in front of that one. What
    ``target`` holds stays the same. Its copies, pickled ones included, are of its own class again.
    """
    usual: Any = type(target)
    bases: tuple[type, ...] = (usual,) if before is None else (before, usual)
    if behind is not None:
        bases = (*bases[:-1], behind) if issubclass(behind, usual) else (*bases, behind)
    kind = _extended(usual, bases)
    target.__class__ = kind
    return Undo(target, functools.partial(_swap_back, kind, usual, ()))


@functools.cache  # objects of one class stay of one class
def _extended(usual: Any, bases: tuple[type, ...]) -> type:
    def reduce(self: Any, protocol: Any) -> Any:
        reduced: Any = usual.__reduce_ex__(self, protocol)
        make, arguments, *state = reduced
        return _made_by, (make, *(usual if argument is kind else argument for argument in arguments)), *state

    named = {name: getattr(usual, name) for name in ("__module__", "__qualname__", "__doc__")}
    kind = type(usual.__name__, bases, {**named, "__reduce_ex__": reduce})
    return kind


def _made_by(make: Callable[..., T], *arguments: Any) -> T:
    return make(*arguments)  # pickle lets copyreg.__newobj__ make nothing but objects of the pickled one's own class


class InertInCopies:
    """A hook that calls ``call``; a copy of it, deep or pickled, calls nothing."""

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[..., Any] | None = None):
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[type["InertInCopies"], tuple[()]]:
        return InertInCopies, ()


class EagerHook(InertInCopies):
    """The same, which calls nothing in a function that is being compiled, either."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if torch.compiler.is_compiling() else super().__call__(*args, **kwargs)
