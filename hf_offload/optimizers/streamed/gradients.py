"""The gradients of one optimizer's parameters, which leave memory in backward and come back when they are used."""

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_offload.errors import OffloadError, StorageError
from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.streamed.clipping import norm_of
from hf_offload.optimizers.streamed.record import (
    Gradient,
    LostGradient,
    Record,
    StoredGradient,
    Update,
)
from hf_offload.parameters.contexts import is_outside, outside
from hf_offload.parameters.demand import gradient_of, set_gradient
from hf_offload.parameters.holders import storage_holders
from hf_offload.storage.stored import Store, Stored, as_bytes


class Gradients:
    """What happens to them. ``lock`` is held by all calls.

    Attributes:
        store: Where they go; None leaves them in memory.
        wants_norms: Whether gradients are measured as they leave memory, for clipping.
    """

    def __init__(self, store: Store | None, lock: "threading.RLock"):
        self.store = store
        self.wants_norms = False
        self._lock = lock

    def leave(self, record: Record, parameter: nn.Parameter) -> None:
        """Move the gradient that backward has put into ``.grad`` to the tier, where it is added to one that is there.

        A gradient stays in memory where others hold it, who may change it from now on, and where its norm depends on the
        order of its elements in memory.
        """
        gradient = gradient_of(parameter)
        assert gradient is not None
        if gradient.requires_grad:  # with create_graph
            self.reveal(record)
            return
        if record.gradient is None and not gradient.is_contiguous():
            return
        assert self.store is not None
        before = record.gradient
        with signals_deferred:
            set_gradient(parameter, None)
            if _references(gradient) > _own_references():
                if before is None:
                    set_gradient(parameter, gradient)
                    return
                gradient = gradient.clone()
            record.gradient = LostGradient(record.name, "It was interrupted.")  # until all parts are added
            record.refresh(parameter)
        try:
            stored = self._added(record, gradient.contiguous(), before)
        except StorageError as error:
            record.gradient = LostGradient(record.name, str(error))
            raise
        record.gradient = stored
        stored.send()
        self.store.throttle()

    def _added(self, record: Record, gradient: Tensor, before: Gradient | None) -> StoredGradient:
        assert self.store is not None
        parts = record.parts_of(gradient)
        if before is not None:
            for number, part in enumerate(parts):
                before.add_to(number, part)
        norm = norm_of(gradient, 2.0) if self.wants_norms else None
        stored: list[Stored | None] = [Stored(self.store, as_bytes(part)) for part in parts]
        return StoredGradient(stored, record.sizes, gradient.dtype, gradient.device, norm)

    @torch._disable_dynamo
    def reveal(self, record: Record) -> None:
        """Put a gradient that is on the tier into ``.grad``, or add it to the one that is there."""
        with self._lock, outside():
            parameter, gradient = record.parameter_ref(), record.gradient
            if parameter is None or gradient is None:
                return
            _finish(record)
            whole = _accumulated(record.whole(gradient, last=False), gradient_of(parameter))
            with signals_deferred:
                record.gradient = None
                set_gradient(parameter, whole)
                record.refresh(parameter)

    def join(self, record: Record) -> None:
        """Put both into ``.grad`` if one gradient is on the tier, and another one in memory. It has just arrived then: hooks
        that were there before the optimizer was prepared come before it leaves.
        """
        parameter = record.parameter_ref()
        if parameter is not None and gradient_of(parameter) is not None:
            self.reveal(record)

    def used(self, update: Update, number: int, part: Tensor, written: bool) -> None:
        """An update has used a part of its gradient, or has ``written`` into it, which those see who look at it later."""
        assert self.store is not None
        assert update.gradient is not None
        if written:
            update.gradient.rewrite(number, part, update.factors, self.store)
        elif part.device.type == "cpu":
            self.store.recycle(as_bytes(part))

    @torch._disable_dynamo
    def replace(self, record: Record, zeros: bool) -> None:
        """Drop the gradient on the tier, for ``zeros`` or nothing."""
        with self._lock, signals_deferred:
            parameter, gradient = record.parameter_ref(), record.gradient
            if parameter is not None and gradient is not None:
                record.gradient = _zeros(record, record.dtype, parameter.device) if zeros else None
                record.refresh(parameter)

    @torch._disable_dynamo
    def zero(self, record: Record) -> None:
        """Drop the gradient for zeros, which take no memory: that in memory, too, unless others hold it."""
        self.replace(record, zeros=True)
        parameter = record.parameter_ref()
        gradient = None if parameter is None else gradient_of(parameter)
        if self.store is None or parameter is None or gradient is None:
            return
        if gradient.layout != torch.strided or not gradient.is_contiguous() or gradient.requires_grad:
            return
        with self._lock, signals_deferred:
            set_gradient(parameter, None)
            if _references(gradient) > _own_references():
                set_gradient(parameter, gradient)
            else:
                record.gradient = _zeros(record, gradient.dtype, gradient.device)
                record.refresh(parameter)

    def norm(self, record: Record, norm_type: float) -> Tensor:
        """The norm of a gradient on the tier. From now on, gradients are measured as they leave memory."""
        with self._lock:
            self.wants_norms = self.wants_norms or norm_type == 2.0
            gradient = record.gradient
            if gradient is None:
                assert record.spent_norm is not None
                if norm_type != 2.0:
                    raise OffloadError(
                        f"{record.name} was updated in backward: of its gradient, only the 2-norm is known."
                    )
                return record.spent_norm
            _finish(record)
            if gradient.norm is not None and norm_type == 2.0 and not gradient.factors and is_outside():
                return gradient.norm
            return norm_of(record.whole(gradient, last=False), norm_type)

    def scale(self, record: Record, factor: Tensor) -> None:
        """Multiply a gradient on the tier when it is used."""
        with self._lock:
            if record.gradient is not None:
                _finish(record)
                record.gradient.factors += (factor,)


def _accumulated(earlier: Tensor, arrived: Tensor | None) -> Tensor:
    """What autograd makes of two gradients; ``earlier`` may be changed."""
    if arrived is None:
        return earlier
    if arrived.requires_grad:  # with create_graph
        with torch.enable_grad():
            return earlier + arrived
    return earlier.add_(arrived)


def _zeros(record: Record, dtype: torch.dtype, device: torch.device) -> StoredGradient:
    return StoredGradient([None] * len(record.sizes), record.sizes, dtype, device)


def _finish(record: Record) -> None:
    """An update with the gradient that is about to be read comes first: some classes write into gradients."""
    if record.update is not None and record.update.gradient is record.gradient:
        record.finish()


def _references(gradient: Tensor) -> int:
    """How many hold a gradient, or memory of it."""
    return sys.getrefcount(gradient) + storage_holders(gradient)


def _own_references() -> int:
    """``_references`` of a gradient that only a variable of the caller holds."""
    gradient = torch.empty(0)
    return _references(gradient)


def watch_gradients(record: Record, parameter: nn.Parameter) -> RemovableHandle:
    """Let the record's streaming know of each gradient that backward has put into ``.grad``, once the parameter trains."""
    trains = parameter.requires_grad
    try:
        return parameter.requires_grad_(True).register_post_accumulate_grad_hook(_Arrival(weakref.ref(record)))
    finally:
        parameter.requires_grad_(trains)


class _Arrival:
    """The hook that autograd calls. A parameter holds it, and it does not hold the parameter's record."""

    def __init__(self, record: "weakref.ref[Record]"):
        self._record = record

    def __call__(self, parameter: Tensor) -> None:
        record = self._record()
        if record is not None and isinstance(parameter, nn.Parameter):
            record.streaming.gradient_arrived(record, parameter)

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> Callable[..., None]:
    return lambda *_: None
