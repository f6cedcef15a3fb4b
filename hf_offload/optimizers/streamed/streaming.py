"""Steps of an optimizer whose state, and the gradients it needs, are on a tier.

Note: one rule for all schedules
    A step notes for each parameter the options of its group, the gradient and its factors as they are now: an
    :class:`~hf_offload.optimizers.streamed.record.Update`. It is computed when the parameter is next used, at the latest
    before the next step; with ``lazy`` false, at once. A failure or Ctrl-C between two parts leaves the rest noted: the
    next use of such a parameter completes it, or raises.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_offload.errors import OffloadError, StorageError
from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.streamed.clipping import norm_of
from hf_offload.optimizers.streamed.demand import DemandedParameter, demanded, gradient_of, set_gradient
from hf_offload.optimizers.streamed.order import UpdateOrder
from hf_offload.optimizers.streamed.parts import joined, split
from hf_offload.optimizers.streamed.record import (
    LostGradient,
    Record,
    StoredGradient,
    Update,
    ZeroGradient,
    part_elements,
)
from hf_offload.optimizers.streamed.shadow import Shadow, options_of
from hf_offload.optimizers.streamed.stored import Store, as_bytes

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""Of a parameter, where it can be cut: a step then needs memory for the state of so much."""


class Streaming:
    """State and gradients of the parameters of one optimizer, between a tier and the parameters' updates.

    Args:
        shadow: Computes the updates.
        states, gradients: Where they go; None leaves gradients in memory.
        resident: The state that is in memory, by parameter: of all that is not streamed, and of what the user has looked at.
        smallest_bytes: Smaller parameters are not streamed.
        part_bytes: Size of the parts that parameters are cut into; None leaves them whole.
        lazy: Whether updates wait for the next use of their parameter.

    Attributes:
        in_backward: Whether each parameter is updated as soon as it has a gradient, from the options of that moment. The
            caller promises one backward a step, and that nothing changes gradients in between.
        wants_norms: Whether gradients are measured as they leave memory, for clipping.
    """

    def __init__(
        self,
        shadow: Shadow,
        states: Store,
        gradients: Store | None,
        resident: dict[Tensor, dict[str, Any]],
        *,
        smallest_bytes: int,
        part_bytes: int | None = PART_BYTES,
        lazy: bool = True,
    ):
        self.in_backward = self.wants_norms = False
        self.lazy = lazy
        self.states = states
        self.gradients = gradients
        self._shadow = shadow
        self._resident = resident
        self._smallest_bytes = smallest_bytes
        self._part_bytes = part_bytes
        self._lock = threading.RLock()
        self._records: dict[int, Record] = {}  # by id of the parameter, which the record's reference checks
        self._handles: list[RemovableHandle] = []
        self._groups: Callable[[], list[dict[str, Any]]] = list
        self._order = UpdateOrder()

    # -- parameters -----------------------------------------------------------------------------------------------------

    def add(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Stream these parameters from now on, as far as they are large enough and of the plain class."""
        for name, parameter in parameters:
            if type(parameter) is not nn.Parameter or parameter.nbytes < self._smallest_bytes:
                continue
            cut = None if self._part_bytes is None else part_elements(self._part_bytes, parameter.itemsize)
            record = Record(parameter, name, self, cut)
            self._records[id(parameter)] = record
            if self.gradients is not None:
                self._handles.append(parameter.register_post_accumulate_grad_hook(_Arrival(weakref.ref(record))))
            state = dict.pop(self._resident, parameter, None)
            if state:
                self._move_state(record, parameter, state)
            self._order.add(record)

    def record_of(self, parameter: Tensor) -> Record | None:
        """The record of a parameter, if it is streamed."""
        record = self._records.get(id(parameter))
        return record if record is not None and record.parameter_ref() is parameter else None

    @property
    def streams_gradients(self) -> bool:
        """Whether gradients leave memory."""
        return self.gradients is not None

    @property
    def records(self) -> list[Record]:
        """Those of all parameters that are still there."""
        return [record for record in self._records.values() if record.parameter_ref() is not None]

    def use_groups(self, groups: Callable[[], list[dict[str, Any]]]) -> None:
        """Where the options of groups are found, for updates in backward."""
        self._groups = groups

    def close(self) -> None:
        """Complete all updates, bring all gradients back, and stream no more gradients. States stay where they are."""
        with self._lock:
            self.finish()
            for record in self.records:
                self.reveal_gradient(record)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    # -- state ----------------------------------------------------------------------------------------------------------

    def has_state(self, parameter: Tensor) -> bool:
        """Whether there is a state on the tier."""
        record = self.record_of(parameter)
        return record is not None and record.moved

    def state_of(self, parameter: Tensor, last: bool) -> dict[str, Any]:
        """A copy of the state on the tier, of the whole parameter. The ``last`` time, it is gone from there.

        Raises :class:`~hf_offload.errors.StorageError` if it cannot be read: then it still is there.
        """
        with self._lock:
            record = self.record_of(parameter)
            assert record is not None
            found = [state.take(parameter.device, last=False)[0] for state in record.states]
            whole = joined(found, record)
            if last:
                self._forget_state(record)
            return whole

    def put_state(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Let ``state`` of the whole parameter take the place of what is there."""
        with self._lock:
            record = self.record_of(parameter)
            assert record is not None
            self._forget_state(record)
            self._move_state(record, parameter, state)

    def loaded(self, parameter: Tensor, options: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """``state`` as the optimizer's class loads it for this parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._shadow.loaded(parameter, options, state)

    def forget_states(self, but: Iterable[Tensor] = ()) -> None:
        """Drop the states of all parameters ``but`` these."""
        with self._lock:
            kept = {id(parameter) for parameter in but}
            for record in self.records:
                if id(record.parameter_ref()) not in kept:
                    self._forget_state(record)

    def _forget_state(self, record: Record) -> None:
        record.states = [type(state)() for state in record.states]
        record.moved = False

    def _move_state(self, record: Record, parameter: Tensor, state: dict[str, Any]) -> None:
        for number, part in enumerate(split(state, record)):
            record.states[number].put(part, {}, None, self.states, parameter.device)
        record.moved = True

    # -- gradients ------------------------------------------------------------------------------------------------------

    def gradient_arrived(self, record: Record, parameter: nn.Parameter) -> None:
        """Backward has put or added a gradient: it leaves memory."""
        gradient = gradient_of(parameter)
        if gradient is None or gradient.requires_grad:  # with create_graph
            return
        if gradient.layout != torch.strided:
            raise OffloadError(
                f"The gradient of {record.name} is sparse, which cannot be streamed: make the embedding with sparse=False, "
                "or set optimizer='none'."
            )
        if record.gradient is None and not gradient.is_contiguous():
            return  # its norm depends on the order of its elements in memory
        with self._lock, torch.no_grad():
            self.finish_record(record)  # of a graph that is older than the last step
            if self.in_backward:
                self._update_in_backward(record, parameter)
                return
            self._store_gradient(record, gradient)
            set_gradient(parameter, None)
            self._refresh(record, parameter)

    def _store_gradient(self, record: Record, gradient: Tensor) -> None:
        gradient = gradient.contiguous()
        parts = record.parts_of(gradient)
        before = record.gradient
        if before is not None:
            try:
                for number, part in enumerate(parts):
                    earlier = before.part(number, last=True, factors=before.factors)
                    torch.add(earlier, part, out=part)  # what autograd's own accumulation computes
                    del earlier
            except StorageError as error:
                record.gradient = LostGradient(error)
                raise
        assert self.gradients is not None
        norm = norm_of(gradient, 2.0) if self.wants_norms else None
        dtype, device = gradient.dtype, gradient.device
        record.gradient = None
        stored = [self.gradients.put(as_bytes(part)) for part in parts]
        record.gradient = StoredGradient(stored, dtype, device, norm)

    def reveal_gradient(self, record: Record) -> None:
        """Put a gradient that is on the tier into ``.grad``."""
        with self._lock, torch.no_grad():
            parameter, gradient = record.parameter_ref(), record.gradient
            if parameter is None or gradient is None:
                return
            shared = record.update is not None and record.update.gradient is gradient
            whole = record.whole(gradient, last=not shared)
            record.gradient = None
            set_gradient(parameter, whole)
            self._refresh(record, parameter)

    def replace_gradient(self, record: Record, zeros: bool) -> None:
        """Drop the gradient on the tier, for ``zeros`` or nothing."""
        with self._lock:
            parameter, gradient = record.parameter_ref(), record.gradient
            if parameter is not None and gradient is not None:
                record.gradient = ZeroGradient(record.sizes, parameter.dtype, parameter.device) if zeros else None
                self._refresh(record, parameter)

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop all gradients on the tier."""
        for record in self.records:
            self.replace_gradient(record, zeros=not set_to_none)

    def gradient_norm(self, record: Record, norm_type: float) -> Tensor:
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
            if gradient.norm is not None and norm_type == 2.0 and not gradient.factors:
                return gradient.norm
            return norm_of(record.whole(gradient, last=False), norm_type)

    def scale_gradient(self, record: Record, factor: Tensor) -> None:
        """Multiply a gradient on the tier when it is used."""
        with self._lock:
            if record.gradient is not None:
                record.gradient.factors += (factor,)

    # -- steps ----------------------------------------------------------------------------------------------------------

    def step(self, groups: list[dict[str, Any]]) -> None:
        """One step of all parameters that have a gradient.

        Raises :class:`~hf_offload.errors.StorageError` if something cannot be read: the step can then be completed, or no
        parameter that is not complete can be used.
        """
        with self._lock, torch.no_grad():
            self.finish()
            waiting: list[tuple[Record, nn.Parameter]] = []
            with signals_deferred:
                noted = self._note(groups)
                for record in self._records.values():
                    record.spent_norm = None
                for record, parameter, update in noted:
                    record.update = update
                    self._refresh(record, parameter)
                    waiting.append((record, parameter))
            # A gradient in memory is the user's, who may change it from now on.
            at_once = [r for r, _ in waiting if r.update is not None and (not self.lazy or r.update.gradient is None)]
            self._order.begin_step()
            for record in self._order.sorted(at_once):
                self.finish_record(record)
            self._order.read_ahead(None)

    def _note(self, groups: list[dict[str, Any]]) -> list[tuple[Record, nn.Parameter, Update]]:
        noted: list[tuple[Record, nn.Parameter, Update]] = []
        small: list[dict[str, Any]] = []
        for group in groups:
            options = options_of(group)
            staying: list[Tensor] = []
            for parameter in group["params"]:
                record = self.record_of(parameter)
                live = gradient_of(parameter)
                if record is None:
                    staying.append(parameter)
                elif live is not None:
                    noted.append((record, parameter, Update(options, None, ())))
                elif record.gradient is not None:
                    noted.append((record, parameter, Update(options, record.gradient, record.gradient.factors)))
            if staying:
                small.append({**options, "params": staying})
        if small:
            state = {p: its for one in small for p in one["params"] if (its := dict.get(self._resident, p)) is not None}
            dict.update(self._resident, self._shadow.step(small, state))
        return noted

    def finish(self) -> None:
        """Compute all updates that are noted."""
        with self._lock:
            for record in self._order.sorted([r for r in self.records if r.update is not None]):
                self.finish_record(record)

    def finish_record(self, record: Record) -> None:
        """Compute the update that a parameter waits for, if there is one."""
        with self._lock:
            parameter = record.parameter_ref()
            if record.update is None or parameter is None:
                return
            try:
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    self._compute(record, parameter, record.update)
            except StorageError as error:
                raise StorageError(
                    f"The last step of {record.name} cannot be completed, so its value must not be used: go on from the last "
                    f"checkpoint. {error}"
                ) from error
            self._order.updated(record)
            self._order.read_ahead(record)

    def _compute(self, record: Record, parameter: nn.Parameter, update: Update) -> None:
        live = gradient_of(parameter)
        whole_state = dict.pop(self._resident, parameter, None)
        if whole_state:  # the user has looked at it, and may have changed it
            self._move_state(record, parameter, whole_state)
        targets = record.targets(parameter)
        lives = None if update.gradient is not None or live is None else record.parts_of(live)
        device = parameter.device
        while update.done < len(targets):
            number = update.done
            target, state = targets[number], record.states[number]
            if update.gradient is not None:
                last = record.gradient is not update.gradient
                gradient = update.gradient.part(number, last, update.factors)
            else:
                assert lives is not None
                gradient = lives[number]
            before, buffer = state.take(device, last=True)
            with signals_deferred:
                if target is not parameter:
                    target.grad = gradient
                elif update.gradient is not None:
                    set_gradient(parameter, gradient.view(record.shape))
                after = before
                try:
                    groups = [{**update.options, "params": [target]}]
                    after = self._shadow.step(groups, {target: dict(before)} if before else {}).get(target, {})
                finally:
                    if target is parameter and update.gradient is not None:
                        set_gradient(parameter, live)
                    state.put(after, before, buffer, self.states, device)
                record.moved = record.moved or bool(after)
                update.done += 1
            del before, buffer, after
            if self.gradients is not None and isinstance(update.gradient, StoredGradient):
                self.gradients.recycle(as_bytes(gradient))
            del gradient
        record.update = None
        self._refresh(record, parameter)

    def _update_in_backward(self, record: Record, parameter: nn.Parameter) -> None:
        if record.spent_norm is not None:
            raise OffloadError(
                f"{record.name} has got a second gradient before the optimizer's step, and was updated with the first one: "
                "its value is not that of any step. Set max_grad_norm to update after backward, and go on from a checkpoint."
            )
        gradient = gradient_of(parameter)
        assert gradient is not None
        record.spent_norm = norm_of(gradient, 2.0)
        group = next(g for g in self._groups() if any(p is parameter for p in g["params"]))
        record.update = Update(options_of(group), None, ())
        self.finish_record(record)
        set_gradient(parameter, None)

    def _refresh(self, record: Record, parameter: nn.Parameter) -> None:
        """Let PyTorch ask before it uses the parameter, or not any more."""
        waits = record.update is not None or record.gradient is not None
        if waits != (type(parameter) is DemandedParameter):
            demanded(parameter, record if waits else None)


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
