"""The copies in another dtype that autocast makes of parameters whose memory comes and goes."""

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.parameters.contexts import outside
from hf_offload.parameters.holders import hull_of, storage_holders
from hf_offload.parameters.saved import Residence, SavedWeight, has_no_memory, whereabouts

_LOWER = (torch.bfloat16, torch.float16)
_CASTS = "_hf_offload_cast"


class _CastValue:
    """The value of a parameter in another dtype that graphs need: it is cast from the parameter, until that changes."""

    __slots__ = ("__weakref__", "dtype", "kept", "version")

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype):
        self.dtype = dtype
        self.version = parameter._version
        self.kept: Tensor | None = None

    def keep(self, parameter: nn.Parameter) -> None:
        """The parameter, which is in memory, is about to change."""
        if self.kept is None and self.version == parameter._version:
            with outside(), torch._C.DisableTorchFunctionSubclass():
                self.kept = parameter.detach().to(self.dtype)


class _CastsOf:
    """What is known of the copies of one parameter: the one that autocast has, with the version of the parameter that it was
    made of, and the values that graphs need.
    """

    __slots__ = ("copy", "values", "version")

    def __init__(self) -> None:
        self.copy: Callable[[], Tensor | None] = _nothing
        self.version = 0
        self.values: list[weakref.ref[_CastValue]] = []

    def live_values(self) -> list[_CastValue]:
        return [value for reference in self.values if (value := reference()) is not None]

    def value(self, parameter: nn.Parameter, dtype: torch.dtype) -> _CastValue:
        """That of ``parameter`` as it is now."""
        live = self.live_values()
        for value in live:
            if value.dtype == dtype and value.kept is None and value.version == parameter._version:
                return value
        made = _CastValue(parameter, dtype)
        self.values = [weakref.ref(value) for value in (*live, made)]
        return made


class SavedCast(SavedWeight):
    """What autograd holds for a copy in another dtype that autocast has made of a parameter, or for a view of one."""

    __slots__ = ("value",)

    def __init__(self, parameter: nn.Parameter, residence: Residence, tensor: Tensor):
        super().__init__(parameter, residence, tensor)
        self.whole = False
        self.version = parameter._version
        self.offset = int(tensor.storage_offset())  # in elements
        self.value = _casts_of(parameter).value(parameter, tensor.dtype)

    def unpack(self) -> Tensor:
        """What was saved, with the former value of a parameter that has changed since, as a copy in memory has it."""
        kept = self.value.kept
        return super().unpack() if kept is None else self._part_of(kept)

    def _view(self, parameter: nn.Parameter) -> Tensor:
        with torch.no_grad():
            return self._part_of(parameter.detach().to(self.value.dtype))

    def _part_of(self, cast: Tensor) -> Tensor:
        return cast.as_strided(self.size, self.stride, self.offset)


class Casts:
    """The copies that autocast makes of ``parameters`` in one operation.

    Autocast keeps a copy of a parameter that trains until its block ends, for the next operation that uses the parameter, and
    autograd keeps what it saves until backward. The copy stays, for it is a part of the graph, but its memory goes: the next
    operation fills it again, and backward makes another one, of the same bits.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters
        self._made: dict[int, tuple[nn.Parameter, Tensor]] = {}
        for parameter in parameters:
            copy = copy_of(parameter)
            # After a change of the parameter, autocast goes on with the copy of its former value.
            if copy is not None and _casts_of(parameter).version == parameter._version:
                self._made[id(copy)] = parameter, copy

    def find(self, tensor: Tensor) -> SavedCast | None:
        """What to save instead of ``tensor``, if it is such a copy or a view of one."""
        if tensor.dtype not in _LOWER or has_no_memory(tensor):
            return None
        copy = tensor if tensor._base is None else tensor._base
        node: Any = copy.grad_fn
        for parameter in self._parameters:
            if parameter.dtype != torch.float32 or copy.numel() != parameter.numel():
                continue
            residence = whereabouts.residence(parameter)
            if residence is None:
                continue
            trained = node is not None and node.name() == "ToCopyBackward0" and _variable(node) is parameter
            frozen = node is None and not parameter.requires_grad
            if not trained and not frozen:
                continue
            if id(copy) in self._made or _is_cast(tensor, parameter):
                if trained:  # and in autocast's cache
                    self._made[id(copy)] = parameter, copy
                return SavedCast(parameter, residence, tensor)
        return None

    def empty(self) -> None:
        """The operation has run: what it was given need not be there for the next one."""
        made = list(self._made.values())
        self._made.clear()
        while made:
            parameter, copy = made.pop()
            residence = whereabouts.residence(parameter)
            if residence is not None and residence.is_held:
                keep_casts(parameter)  # others may write there
                forget_cast(parameter)  # and autocast goes on with the former value
                continue
            # Python holds it by this variable alone, and nothing else has its memory.
            if sys.getrefcount(copy) <= 2 + _references_of_the_library() and storage_holders(copy) == 1:
                casts = _casts_of(parameter)
                casts.copy, casts.version = weakref.ref(copy), parameter._version
                copy.data = hull_of(copy)


def fill_cast(parameter: nn.Parameter) -> bool:
    """Let autocast find a copy of ``parameter``, which is in memory, where it has made one. It comes before any change.
    Returns whether graphs need a cast of the parameter as it is.
    """
    casts: _CastsOf | None = vars(parameter).get(_CASTS)
    if casts is None:
        return False
    copy = casts.copy()
    if copy is not None and copy.untyped_storage().nbytes() == 0:
        with torch.no_grad():
            copy.data = parameter.detach().to(copy.dtype)
    return bool(casts.live_values())


def has_casts(parameter: nn.Parameter) -> bool:
    """Whether graphs need a cast of the parameter."""
    casts: _CastsOf | None = vars(parameter).get(_CASTS)
    return casts is not None and bool(casts.live_values())


def keep_casts(parameter: nn.Parameter) -> None:
    """``parameter``, which is in memory, may change from now on: let graphs have their casts of the present value."""
    casts: _CastsOf | None = vars(parameter).get(_CASTS)
    if casts is not None:
        for value in casts.live_values():
            value.keep(parameter)


def forget_cast(parameter: nn.Parameter) -> None:
    """The memory of ``parameter`` stays, and that of its copy: the reference to it is one that pickle would refuse."""
    vars(parameter).pop(_CASTS, None)


def copy_of(parameter: nn.Parameter) -> Tensor | None:
    """The copy that autocast has of ``parameter``, if it has one."""
    casts: _CastsOf | None = vars(parameter).get(_CASTS)
    return None if casts is None else casts.copy()


@functools.cache
def _references_of_the_library() -> int:
    """How many references to a tensor's object PyTorch counts as its own when it holds the tensor; of late, one."""
    tensor = torch.ones(1, device="cpu")
    alone = sys.getrefcount(tensor)
    view = tensor.view(1)  # holds what it is a view of
    return sys.getrefcount(tensor) - alone if view._base is tensor else 0


def _casts_of(parameter: nn.Parameter) -> _CastsOf:
    found: _CastsOf = vars(parameter).setdefault(_CASTS, _CastsOf())
    return found


def _nothing() -> None:
    return None


def _variable(node: Any) -> Any:
    below = node.next_functions[0][0]
    return getattr(below, "variable", None)


def _is_cast(tensor: Tensor, parameter: nn.Parameter) -> bool:
    """Whether ``tensor`` has the bits of ``parameter`` in its dtype."""
    with torch.no_grad():
        cast = parameter.detach().to(tensor.dtype)
        if tensor.numel() != cast.numel():
            return False
        same_place = cast.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return torch.equal(same_place.view(torch.int16), tensor.detach().view(torch.int16))
