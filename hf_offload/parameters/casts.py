"""The copies in another dtype that autocast makes of parameters whose memory comes and goes."""

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.errors import OffloadError
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
            if (copy := _copy_of(parameter)) is not None:
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
            if node is None:
                if not parameter.requires_grad and _is_cast(tensor, parameter):
                    return SavedCast(parameter, residence, tensor)
            elif node.name() == "ToCopyBackward0" and _variable(node) is parameter:
                self._made[id(copy)] = parameter, copy
                return SavedCast(parameter, residence, tensor)
        return None

    def empty(self) -> None:
        """The operation has run: what it was given need not be there for the next one."""
        made = list(self._made.values())
        self._made.clear()
        while made:
            parameter, copy = made.pop()
            # Python holds it by this variable alone, and nothing else has its memory.
            if sys.getrefcount(copy) <= 2 + _references_of_the_library() and storage_holders(copy) == 1:
                vars(parameter)[_CASTS] = weakref.ref(copy), parameter._version
                copy.data = hull_of(copy)


def fill_cast(parameter: nn.Parameter) -> None:
    """Let autocast find a copy of ``parameter``, which is in memory, where it has made one.

    Raises :class:`~hf_offload.errors.OffloadError` if the parameter was changed since: PyTorch would use the former value.
    """
    copy = _copy_of(parameter)
    if copy is None or copy.untyped_storage().nbytes():
        return
    if vars(parameter)[_CASTS][1] != parameter._version:
        raise OffloadError(
            "A weight was changed inside a block of torch.autocast, in which PyTorch goes on with its former value: let the "
            "block end before the optimizer steps."
        )
    with torch.no_grad():
        copy.data = parameter.detach().to(copy.dtype)


@functools.cache
def _references_of_the_library() -> int:
    """How many references to a tensor's object PyTorch counts as its own when it holds the tensor; of late, one."""
    tensor = torch.ones(1, device="cpu")
    alone = sys.getrefcount(tensor)
    view = tensor.view(1)  # holds what it is a view of
    return sys.getrefcount(tensor) - alone if view._base is tensor else 0


def _copy_of(parameter: nn.Parameter) -> Tensor | None:
    found = vars(parameter).get(_CASTS)
    return None if found is None else found[0]()


def _variable(node: Any) -> Any:
    below = node.next_functions[0][0]
    return getattr(below, "variable", None)


def _is_cast(tensor: Tensor, parameter: nn.Parameter) -> bool:
    """Whether ``tensor`` has the bits of ``parameter`` in its dtype: one that does not train leaves no trace of its cast."""
    with torch.no_grad():
        cast = parameter.detach().to(tensor.dtype)
        if tensor.numel() != cast.numel():
            return False
        same_place = cast.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return torch.equal(same_place.view(torch.int16), tensor.detach().view(torch.int16))
