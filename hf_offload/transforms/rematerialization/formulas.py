"""How tensors are recomputed from others that are saved anyway: noted where they are made, looked up where they are saved."""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Formula:
    """``build(*tensors)`` is the tensor again, to the last bit. Autograd saves ``tensors``, ``build`` holds none."""

    tensors: tuple[Tensor, ...]
    build: Callable[..., Tensor]


def as_it_is(tensor: Tensor) -> Formula:
    """The formula of a tensor that is saved itself."""
    return Formula((tensor,), same)


class Formulas:
    """The formulas of one model's tensors. Each is forgotten when its tensor goes, all when the forward ends.

    Attributes:
        in_use: Whether modules save less at present.
    """

    def __init__(self) -> None:
        self.in_use = True
        # By the tensor's id. C code forgets: what a handler of signals raises in a reference's Python would be lost.
        self._known: dict[int, tuple[weakref.ref[Tensor], _Entry]] = {}

    def remember(self, made: Tensor, formula: Formula | None) -> None:
        """Note how ``made`` is computed; None: the operation that made it saves it, so saving it twice costs nothing."""
        if made.requires_grad:
            tensors = () if formula is None else formula.tensors
            versions = made._version, tuple(one._version for one in tensors)
            gone: Any = functools.partial(self._known.pop, id(made))
            self._known[id(made)] = weakref.ref(made, gone), _Entry(versions, _saving_hooks(), formula)

    def of(self, tensor: Tensor) -> Formula | None:
        """How ``tensor``, or what it is a reshaped view of, can be recomputed; None if it cannot.

        Not if it, or what it is made from, was changed in place since. Nor across the border of a checkpointed region, whose
        recompute would not find what the first forward has found.
        """
        whole = tensor
        entry = self._entry_of(tensor)
        if entry is None and _has_all_of(tensor, tensor._base):
            whole = tensor._base  # type: ignore[assignment]  # it has one
            entry = self._entry_of(whole)
        if entry is None or entry.hooks != _saving_hooks():
            return None
        formula = as_it_is(whole) if entry.formula is None else entry.formula
        tensors = () if entry.formula is None else formula.tensors
        if entry.versions != (whole._version, tuple(one._version for one in tensors)):
            return None
        if whole is tensor:
            return formula
        return Formula(formula.tensors, functools.partial(_reshaped, formula.build, tensor.shape))

    def _entry_of(self, tensor: Tensor | None) -> "_Entry | None":
        reference, entry = self._known.get(id(tensor), (None, None))
        return None if reference is None or reference() is not tensor else entry

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Formulas":
        return memo.setdefault(id(self), Formulas())

    def __reduce__(self) -> tuple[Any, ...]:
        return Formulas, ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    versions: tuple[int, tuple[int, ...]]
    hooks: Any
    formula: Formula | None


def _has_all_of(view: Tensor, base: Tensor | None) -> bool:
    return base is not None and view.numel() == base.numel() and view.is_contiguous() and base.is_contiguous()


def _saving_hooks() -> Any:
    # Who autograd hands saved tensors to. Activation checkpointing has its own for every region.
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def same(tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor


def _reshaped(build: Callable[..., Tensor], shape: torch.Size, *tensors: Tensor) -> Tensor:
    return build(*tensors).view(shape)
