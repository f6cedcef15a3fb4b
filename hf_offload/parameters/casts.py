"""The copies in another dtype that autocast makes of parameters whose memory comes and goes."""

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.parameters.holders import hull_of, storage_holders
from hf_offload.parameters.saved import Residence, SavedWeight, has_no_memory, whereabouts

_LOWER = (torch.bfloat16, torch.float16)
_CASTS = "_hf_offload_cast"


class SavedCast(SavedWeight):
    """What autograd holds for a copy in another dtype that autocast has made of a parameter, or for a view of one."""

    __slots__ = ("cast_dtype",)

    def __init__(self, parameter: nn.Parameter, residence: Residence, tensor: Tensor):
        super().__init__(parameter, residence, tensor)
        self.whole = False
        self.version = parameter._version
        self.offset = int(tensor.storage_offset())  # in elements
        self.cast_dtype = tensor.dtype

    def _view(self, parameter: nn.Parameter) -> Tensor:
        with torch.no_grad():
            cast = parameter.detach().to(self.cast_dtype)
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
            copy, version = _copy_of(parameter)
            # After a change of the parameter, autocast goes on with the copy of its former value.
            if copy is not None and version == parameter._version:
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
                forget_cast(parameter)  # others may write there, and autocast goes on with the former value
                continue
            # Python holds it by this variable alone, and nothing else has its memory.
            if sys.getrefcount(copy) <= 2 + _references_of_the_library() and storage_holders(copy) == 1:
                vars(parameter)[_CASTS] = weakref.ref(copy), parameter._version
                copy.data = hull_of(copy)


def fill_cast(parameter: nn.Parameter) -> None:
    """Let autocast find a copy of ``parameter``, which is in memory, where it has made one. It comes before any change."""
    copy, _ = _copy_of(parameter)
    if copy is not None and copy.untyped_storage().nbytes() == 0:
        with torch.no_grad():
            copy.data = parameter.detach().to(copy.dtype)


def forget_cast(parameter: nn.Parameter) -> None:
    """The memory of ``parameter`` stays, and that of its copy: the reference to it is one that pickle would refuse."""
    vars(parameter).pop(_CASTS, None)


@functools.cache
def _references_of_the_library() -> int:
    """How many references to a tensor's object PyTorch counts as its own when it holds the tensor; of late, one."""
    tensor = torch.ones(1, device="cpu")
    alone = sys.getrefcount(tensor)
    view = tensor.view(1)  # holds what it is a view of
    return sys.getrefcount(tensor) - alone if view._base is tensor else 0


def _copy_of(parameter: nn.Parameter) -> tuple[Tensor | None, int]:
    """The copy that autocast has, if it has one, and the version of the parameter that it was made of."""
    reference, version = vars(parameter).get(_CASTS, (_nothing, 0))
    return reference(), version


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
