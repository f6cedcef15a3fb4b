"""The hooks of autograd that note parameters instead of holding their memory.

Note: hooks for one operation
    An operation saves its weight, or a view of it, and would hold its memory until backward. So the hooks of
    :func:`saving_hooks` are there while an operation runs that uses such a parameter. They note the parameter and the view,
    and let it come to memory when backward asks. What else the operation saves goes to the hooks that were there before, or
    is kept as autograd keeps it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.interrupts import signals_deferred
from hf_offload.parameters.casts import Casts
from hf_offload.parameters.recompute import as_tensor, is_of_checkpoint, what_checkpoint_keeps
from hf_offload.parameters.saved import KeptTensor, whereabouts


class _Hooks:
    """A pair of hooks on top of the ``outer`` ones, if there are any."""

    def __init__(
        self,
        outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None,
        casts: Casts | None,
    ):
        self._outer = outer
        self._casts = casts

    def pack(self, tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            weight = whereabouts.find(tensor)
            if weight is None and self._casts is not None:
                weight = self._casts.find(tensor)
        if weight is not None and (self._outer is None or not is_of_checkpoint(self._outer[0])):
            return weight.unpack
        if self._outer is not None:
            pack, unpack = self._outer
            handle = pack(tensor if weight is None else what_checkpoint_keeps(pack, tensor, weight))
            return lambda: as_tensor(unpack(handle))
        # A leaf holds no graph. Anything else does, and would hold itself.
        return KeptTensor(tensor if tensor.is_leaf else tensor.detach(), tensor._version).unpack

    @staticmethod
    def unpack(saved: Callable[[], Tensor]) -> Tensor:
        return saved()


@contextlib.contextmanager
def saving_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """``parameters``, which are in :data:`whereabouts`, are not held by what autograd saves inside the block."""
    autograd: Any = torch._C._autograd
    if not torch.is_grad_enabled() or not autograd._saved_tensors_hooks_is_enabled():
        yield
        return
    outer = autograd._top_saved_tensors_default_hooks(False)
    if outer is not None and isinstance(getattr(outer[0], "__self__", None), _Hooks):
        yield
        return
    casts = Casts(parameters) if torch.is_autocast_enabled(parameters[0].device.type) else None
    hooks = _Hooks(outer, casts)
    pushed = False
    try:
        with signals_deferred:
            autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
            pushed = True
        yield
    finally:
        if pushed:  # no function of Python, in front of which a signal could come
            autograd._pop_saved_tensors_default_hooks()
        if casts is not None:
            casts.empty()
