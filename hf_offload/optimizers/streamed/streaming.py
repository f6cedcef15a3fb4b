"""Steps of an optimizer whose state, and the gradients it needs, are on a tier.

Note: one rule for all schedules
    A step notes for each parameter the options of its group, the gradient and its factors as they are now: an
    :class:`~hf_offload.optimizers.streamed.record.Update`. It is computed when the parameter is next used, at the latest
    before the next step. It is computed at once with ``lazy`` false, where others hold the parameter's memory, who would
    read it without asking, and as the note in :mod:`~hf_offload.parameters.contexts` says. A failure or Ctrl-C
    between two parts leaves the rest noted: the next use of such a parameter completes it, or raises.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from hf_offload.errors import OffloadError, StorageError
from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.streamed.clipping import norm_of
from hf_offload.optimizers.streamed.damage import Damage
from hf_offload.optimizers.streamed.entries import Entries
from hf_offload.optimizers.streamed.gradients import Gradients, watch_gradients
from hf_offload.optimizers.streamed.held import is_held
from hf_offload.optimizers.streamed.order import UpdateOrder
from hf_offload.optimizers.streamed.record import Record, Update, part_elements
from hf_offload.optimizers.streamed.shadow import Shadow, attributes_of, names_of, options_of
from hf_offload.optimizers.streamed.states import States
from hf_offload.parameters.contexts import StepContext, is_outside, outside
from hf_offload.parameters.demand import gradient_of, held_elsewhere, own_class, set_gradient
from hf_offload.parameters.waiting import about_to_change, demand_of, in_memory
from hf_offload.plan.windows import PART_BYTES
from hf_offload.storage.service import GRADIENTS, OPTIMIZER_STATE
from hf_offload.storage.stored import Store
from hf_offload.tensors import nbytes_of

logger = logging.getLogger(__name__)

_CHECKPOINT = CheckpointFunction.backward.__code__


class Streaming:
    """State and gradients of the parameters of one optimizer, between a tier and the parameters' updates.

    Args:
        shadow: Computes the updates.
        state_store, gradient_store: Where they go; None leaves gradients in memory.
        resident: The state that is in memory, by parameter: of all that is not streamed, and of what the user has looked at.
        smallest_bytes: Smaller parameters are not streamed.
        part_bytes: Size of the parts that parameters are cut into; None leaves them whole.
        lazy: Whether updates wait for the next use of their parameter.
        must_stream: Whether a gradient that cannot be streamed is an error. If not, its parameter is streamed no more.
        whole: Whether the optimizer's own ``step()`` runs as it is, on all gradients and state in memory.

    Attributes:
        in_backward: Whether each parameter is updated as soon as it has a gradient, from the options of that moment. The
            caller promises one backward a step, and that nothing changes gradients in between.
        unless: Asked when the first gradient of a step arrives: where it is true, ``in_backward`` ends before that.
    """

    def __init__(
        self,
        shadow: Shadow,
        state_store: Store,
        gradient_store: Store | None,
        resident: dict[Tensor, dict[str, Any]],
        *,
        smallest_bytes: int,
        part_bytes: int | None = PART_BYTES,
        lazy: bool = True,
        must_stream: bool = True,
        whole: bool = False,
    ):
        self.in_backward = False
        self.unless: Callable[[], bool] | None = None
        self._has_asked = False
        self.lazy = lazy and not whole
        self.whole = whole
        self._shadow = shadow
        self._resident = resident
        self._smallest_bytes = smallest_bytes
        self._part_bytes = part_bytes
        self._must_stream = must_stream
        self._lock = threading.RLock()
        self.states = States(state_store, self._lock)
        self.gradients = Gradients(gradient_store, self._lock)
        self._records: dict[int, Record] = {}  # by id of the parameter, which the record's reference checks
        self._staying: dict[int, Record] = {}  # the same of those whose state and gradients are in memory meanwhile
        self._handles: list[RemovableHandle] = []
        self._optimizer: Callable[[], Optimizer | None] = lambda: None
        self._order = UpdateOrder()
        self.entries = Entries()
        self.damage = Damage()
        self._told_of_held = False

    # -- parameters -----------------------------------------------------------------------------------------------------

    def add(self, parameters: Iterable[tuple[str, nn.Parameter]], cuts: bool, state_holders: int = 1) -> None:
        """Stream these parameters from now on, as far as they are large enough and of the plain class. If it ``cuts``, a
        parameter may step in parts, otherwise only as a whole. So many ``state_holders`` are the optimizer's own.
        """
        if not cuts:
            self._part_bytes = None
        for name, parameter in parameters:
            if (demand := demand_of(parameter)) is not None:  # of an optimizer that has gone
                demand.finish()
                demand.reveal_gradient()
            trains = parameter.is_floating_point() or parameter.is_complex()
            if own_class(parameter) is not nn.Parameter or not trains or nbytes_of(parameter) < self._smallest_bytes:
                continue
            record = Record(parameter, name, self, self._part_elements(parameter))
            self._records[id(parameter)] = record
            if self.gradients.store is not None:
                self._handles.append(watch_gradients(record, parameter))
            self._move_state(record, parameter, state_holders)
            self._order.add(record)

    def let_stay(self, parameters: Iterable[Tensor]) -> None:
        """State and gradients of these are in memory from now on, and those of all others that are streamed leave it again.
        Between steps.

        Raises :class:`~hf_offload.errors.StorageError` for a state that cannot be read.
        """
        wanted = {id(parameter) for parameter in parameters}
        with self._handled(OPTIMIZER_STATE), self._lock:
            for key, record in list(self._staying.items()):
                parameter = record.parameter_ref()
                if parameter is None:
                    del self._staying[key]
                elif key not in wanted:
                    self._stream_again(record, parameter)
            for record in self.records:
                parameter = record.parameter_ref()
                if parameter is not None and id(parameter) in wanted:
                    self._staying[id(parameter)] = record
                    self._bring(record, parameter)

    def _stream_again(self, record: Record, parameter: nn.Parameter) -> None:
        with signals_deferred:
            record.lay_out(parameter, self._part_elements(parameter))
            del self._staying[id(parameter)]
            self._records[id(parameter)] = record
        self._move_state(record, parameter)

    def _bring(self, record: Record, parameter: nn.Parameter) -> None:
        """Its state and gradient are in memory, and not streamed any more."""
        self.finish_record(record)
        self.gradients.reveal(record)
        state = self.state_of(parameter) if record.moved else None
        with signals_deferred:
            if state is not None:
                dict.setdefault(self._resident, parameter, state)
                self.states.forget(record)
            del self._records[id(parameter)]

    def record_of(self, parameter: Tensor) -> Record | None:
        """The record of a parameter, if it is streamed."""
        record = self._records.get(id(parameter))
        return record if record is not None and record.parameter_ref() is parameter else None

    def known_record_of(self, parameter: Tensor) -> Record | None:
        """The same, also where its state stays in memory for now."""
        record = self.record_of(parameter) or self._staying.get(id(parameter))
        return record if record is not None and record.parameter_ref() is parameter else None

    def _part_elements(self, parameter: Tensor) -> int | None:
        return None if self._part_bytes is None else part_elements(self._part_bytes, parameter.itemsize)

    def _match_layout(self, record: Record, parameter: nn.Parameter) -> None:
        """The user may have given the parameter other memory: ``parameter.data = ...``."""
        if record.fits(parameter):
            return
        if record.moved:
            state = self.state_of(parameter)
            with signals_deferred:
                dict.setdefault(self._resident, parameter, state)
                self.states.forget(record)
        self.gradients.reveal(record)
        record.lay_out(parameter, self._part_elements(parameter))
        record.is_doubtful = True

    @property
    def streams_gradients(self) -> bool:
        """Whether gradients leave memory."""
        return self.gradients.store is not None

    @property
    def records(self) -> list[Record]:
        """Those of all parameters that are still there."""
        return [record for record in self._records.values() if record.parameter_ref() is not None]

    def use_optimizer(self, optimizer: Callable[[], Optimizer | None]) -> None:
        """Where the optimizer is found, if it is still there."""
        self._optimizer = optimizer

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all groups."""
        optimizer = self._optimizer()
        return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]

    def parameters_by_state(self) -> list[nn.Parameter]:
        """The same, in the order in which those that have a state have got it."""
        return self.entries.sorted(self.parameters())

    # -- state ----------------------------------------------------------------------------------------------------------

    def has_state(self, parameter: Tensor) -> bool:
        """Whether there is a state on the tier, after all steps that were taken."""
        record = self.record_of(parameter)
        if record is not None:
            self.finish_record(record)
        return record is not None and record.moved

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """See :meth:`~hf_offload.optimizers.streamed.states.States.get`."""
        record = self.record_of(parameter)
        assert record is not None
        return self.states.get(record, parameter)

    def put_state(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """See :meth:`~hf_offload.optimizers.streamed.states.States.put`."""
        record = self.record_of(parameter)
        assert record is not None
        self._match_layout(record, parameter)
        record.given.replace()
        self.states.put(record, parameter, state)
        record.given.add(state)

    def forget_state(self, parameter: Tensor) -> None:
        """Drop the state of a parameter."""
        record = self.record_of(parameter)
        if record is not None:
            self.states.forget(record)

    def _move_state(self, record: Record, parameter: Tensor, holders: int = 1) -> None:
        """The user has looked at a state, and may have changed it, or it was there before. It stays while others hold it."""
        record.state_stays = False
        if not dict.__contains__(self._resident, parameter):
            return
        if is_held(self._resident, parameter, holders):
            record.state_stays = True
            self._tell_of_held(record)
            return
        self.states.put(record, parameter, dict.__getitem__(self._resident, parameter))
        dict.pop(self._resident, parameter)

    def _tell_of_held(self, record: Record) -> None:
        if not self._told_of_held:
            self._told_of_held = True
            logger.info(
                "The optimizer's state of %s is held elsewhere (its tensors, a view, a state dict): while that is so, it is "
                "in memory, and its gradient during steps. The same goes for the state of other weights.",
                record.name,
            )

    def loaded(self, parameter: Tensor, options: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """``state`` as the optimizer's class loads it for this parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._shadow.loaded(parameter, options, state)

    def forget_states(self, but: Iterable[Tensor] = ()) -> None:
        """Drop the states of all parameters ``but`` these."""
        kept = {id(parameter) for parameter in but}
        for record in (*self.records, *self._staying.values()):
            if id(record.parameter_ref()) not in kept:
                record.given.replace()
                self.states.forget(record)

    # -- gradients ------------------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def gradient_arrived(self, record: Record, parameter: nn.Parameter) -> None:
        """Backward has put or added a gradient: it leaves memory."""
        gradient = gradient_of(parameter)
        if gradient is None or self.record_of(parameter) is not record:
            return
        is_sparse = gradient.layout != torch.strided
        del gradient  # other references are counted
        with self._handled(GRADIENTS), self._lock, outside():
            if is_sparse:
                self._let_sparse_stay(record, parameter)
                return
            self.finish_record(record)  # of a graph that is older than the last step
            self._match_layout(record, parameter)
            if record.gradient is None and self._optimizer() is None:
                return
            if self._updates_now() and _comes_once(record):
                self._update_in_backward(record, parameter)
            else:
                self.gradients.leave(record, parameter)

    def _updates_now(self) -> bool:
        """Whether this backward updates weights: none of them, or all."""
        if self.in_backward and not self._has_asked:
            self._has_asked = True
            if self.unless is not None and self.unless():
                self.in_backward = False
                logger.info("Gradients are looked at before the step: weights are updated after backward from now on.")
        return self.in_backward

    def _let_sparse_stay(self, record: Record, parameter: nn.Parameter) -> None:
        """A gradient is sparse: if it was not asked for that it leaves, it stays in memory, and the state with it."""
        if self._must_stream and not self.whole:
            raise OffloadError(
                f"The gradient of {record.name} is sparse, which cannot be streamed: make the embedding with sparse=False, "
                "or set optimizer='none'."
            )
        self._bring(record, parameter)
        logger.info(
            "The gradient of %s is sparse, which cannot be streamed: it stays in memory, and so does its state.",
            record.name,
        )

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop all gradients on the tier, and those in memory that zeros take the place of."""
        for record in self.records:
            record.drop_gradient()
            if set_to_none:
                self.gradients.replace(record, zeros=False)
            else:
                self.gradients.zero(record)

    # -- steps ----------------------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def step(self, optimizer: Optimizer) -> None:
        """One step of all parameters that have a gradient.

        Raises :class:`~hf_offload.errors.StorageError` if something cannot be read: the step can then be completed, or no
        parameter that is not complete can be used.
        """
        with signals_deferred, self._handled(OPTIMIZER_STATE), self._lock, torch.no_grad():
            self.damage.check_step(self.records)
            self.finish()
            self._has_asked = False
            context = StepContext(attributes_of(optimizer), torch.get_default_dtype())
            may_wait = self.lazy and is_outside()
            at_once: list[Record] = []
            with torch._C.DisableTorchFunctionSubclass():
                self._take_over(self.parameters())
                noted = self._note(optimizer.param_groups, context)
                for record in self.records:
                    record.end_backward()
                for record, parameter, update in noted:
                    record.update = update
                    record.refresh(parameter)
                    # A gradient in memory is the user's, who may change it from now on. Errors belong to the step.
                    waits = may_wait and update.gradient is not None and not record.is_doubtful
                    waits = (
                        waits and torch._debug_has_internal_overlap(parameter) == 0
                    )  # which in-place operations refuse
                    if waits and not held_elsewhere(parameter):
                        about_to_change(parameter)
                        update.begin_to_wait(parameter)
                    else:
                        at_once.append(record)
            self._order.begin_step()
            for record in self._order.sorted(at_once):
                self._finish(record, contextlib.nullcontext())
            self._order.read_ahead(None, all_states=self.in_backward)

    @contextlib.contextmanager
    def all_in_memory(self, state: dict[Any, dict[str, Any]]) -> Iterator[None]:
        """All gradients and all of the optimizer's ``state`` are in memory inside the block, and state leaves it afterwards.

        Raises :class:`~hf_offload.errors.StorageError` if something cannot be read: nothing has changed then.
        """
        with self._handled(OPTIMIZER_STATE):
            self.damage.check_step(self.records)
            for record in self.records:
                self.gradients.reveal(record)
            for trained in self.parameters():
                state.get(trained)
        try:
            yield
        finally:
            with self._handled(OPTIMIZER_STATE), self._lock:
                for record in self.records:
                    parameter = record.parameter_ref()
                    if parameter is not None:
                        self._match_layout(record, parameter)
                        self._move_state(record, parameter)

    def _take_over(self, parameters: Iterable[nn.Parameter]) -> None:
        """Layouts and states are what the user has made of them. This may wait for a drive, and changes no value yet."""
        for parameter in parameters:
            record = self.record_of(parameter)
            gradient = gradient_of(parameter)
            if record is None and gradient is not None:
                staying = self.known_record_of(parameter)
                if staying is not None:
                    staying.given.step()
            if record is not None and gradient is not None and gradient.layout != torch.strided:
                # It has not arrived in backward, or not in one that is watched.
                self._let_sparse_stay(record, parameter)
            elif record is not None:
                record.state_stays = False
                self._match_layout(record, parameter)
                self.gradients.join(record)
                if gradient_of(parameter) is not None or record.gradient is not None:
                    record.given.step()
                    self._move_state(record, parameter)
                    if record.state_stays:
                        self.gradients.reveal(record)

    def _note(self, groups: list[dict[str, Any]], context: StepContext) -> list[tuple[Record, nn.Parameter, Update]]:
        noted: list[tuple[Record, nn.Parameter, Update]] = []
        small: list[dict[str, Any]] = []
        held: list[dict[str, Any]] = []
        for group in groups:
            options = options_of(group)
            staying: list[int] = []
            for number, parameter in enumerate(group["params"]):
                record = self.record_of(parameter)
                if gradient_of(parameter) is not None or (record is not None and record.has_gradient):
                    self.entries.add(parameter)
                if record is None:
                    staying.append(number)
                    continue
                record.check_step(options)
                its_options = {**options, **names_of(group, [number])}
                if record.state_stays:
                    held.append({**its_options, "params": [parameter]})
                elif gradient_of(parameter) is not None:
                    noted.append((record, parameter, Update(context, its_options, None, ())))
                elif record.gradient is not None:
                    update = Update(context, its_options, record.gradient, record.gradient.factors)
                    noted.append((record, parameter, update))
            if staying:
                its_parameters = [group["params"][number] for number in staying]
                small.append({**options, **names_of(group, staying), "params": its_parameters})
        if small:
            self._step_in_memory(small, context)
        for one in held:  # a large one at a time
            self._step_in_memory([one], context)
        return noted

    def _step_in_memory(self, groups: list[dict[str, Any]], context: StepContext) -> None:
        """A step of the parameters in ``groups``, whose state and gradients are in memory."""
        state = {p: its for one in groups for p in one["params"] if (its := dict.get(self._resident, p)) is not None}
        parameters = [p for one in groups for p in one["params"]]
        with in_memory(parameters, changed=True), self._handled(None):
            dict.update(self._resident, self._shadow.step(groups, state, context.attributes))

    def finish(self) -> None:
        """Compute all updates that are noted."""
        with self._lock:
            for record in self._order.sorted([r for r in self.records if r.update is not None]):
                self.finish_record(record)

    @torch._disable_dynamo
    def finish_record(self, record: Record) -> None:
        """Compute the update that a parameter waits for, if there is one."""
        with self._lock:
            if record.update is not None:
                self._finish(record, record.update.context.restored())

    def _finish(self, record: Record, context: contextlib.AbstractContextManager[None]) -> None:
        parameter = record.parameter_ref()
        if record.update is None or parameter is None:
            return
        try:
            with (
                signals_deferred,
                self._handled(OPTIMIZER_STATE),
                context,
                torch.no_grad(),
                torch._C.DisableTorchFunctionSubclass(),
                in_memory([parameter], changed=True),
            ):
                self._compute(record, parameter, record.update)
                self._order.updated(record)
        except StorageError as error:
            raise StorageError(
                f"The last step of {record.name} cannot be completed, so its value must not be used: go on from the last "
                f"checkpoint. {error}"
            ) from error

    def _handled(self, kind: str | None) -> contextlib.AbstractContextManager[None]:
        return self.states.store.storage.handling.of(kind)

    def overwrite(self, record: Record) -> None:
        """A parameter is about to get another value."""
        with self._lock:
            self.damage.overwrite(record, self)

    def _compute(self, record: Record, parameter: nn.Parameter, update: Update) -> None:
        live = gradient_of(parameter)
        targets = record.targets(parameter)
        lives: list[Any] = [None] * len(targets) if live is None else record.parts_of(live)
        while update.done < len(targets):
            number = update.done
            target, state = targets[number], record.states[number]
            if update.gradient is not None:
                update.gradient.load(number)
            state.load()
            self._order.read_ahead(record, all_states=self.in_backward)  # arrives while this part is computed
            # Nothing waits from here until the part is done: no signal is delivered in its midst.
            last = record.gradient is not update.gradient
            gradient = lives[number]
            if update.gradient is not None:
                gradient = update.gradient.part(number, last, update.factors)
            version = None if gradient is None else gradient._version
            before, buffer = state.take(parameter.device, last=True)
            if target is not parameter:
                target.grad = gradient
            elif update.gradient is not None:
                set_gradient(parameter, gradient.view(record.shape))
            after = before
            try:
                its_state = {} if before is None else {target: dict(before)}
                counted = parameter._version
                after = self._shadow.step(
                    [{**update.options, "params": [target]}], its_state, update.context.attributes
                ).get(target)
                changes = parameter._version - counted
            except Exception:
                self._give_up(update.context)
                raise
            finally:
                if target is not parameter:
                    target.grad = None
                elif update.gradient is not None:
                    set_gradient(parameter, live)
                state.put(after, before, buffer, self.states.store, parameter.device)
            if update.gradient is not None:
                written = gradient._version != version and not last
                self.gradients.used(update, number, gradient, written)
            record.moved = record.moved or after is not None
            update.done += 1
            if update.done == len(targets):
                update.count_once(parameter, changes, len(targets))
                record.update, record.is_doubtful = None, False
                record.refresh(parameter)
            del gradient, before, buffer, after
            state.send()
            self.states.store.throttle()
            signals_deferred.deliver()

    def _give_up(self, context: StepContext) -> None:
        """The class has raised an error, as it does in memory, where the rest of the step is not taken either."""
        for record in self.records:
            parameter = record.parameter_ref()
            if record.update is not None and record.update.context is context and parameter is not None:
                record.update = None
                record.refresh(parameter)

    def _update_in_backward(self, record: Record, parameter: nn.Parameter) -> None:
        if record.spent_norm is not None:
            raise OffloadError(
                f"{record.name} has got a second gradient before the optimizer's step, and was updated with the first one: "
                "its value is not that of any step. Set max_grad_norm to update after backward, and go on from a checkpoint."
            )
        gradient, optimizer = gradient_of(parameter), self._optimizer()
        assert gradient is not None
        assert optimizer is not None
        norm = norm_of(gradient, 2.0)
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        context = StepContext(attributes_of(optimizer), torch.get_default_dtype())
        record.given.step()
        self._move_state(record, parameter)
        options = options_of(group)
        number = next(number for number, p in enumerate(group["params"]) if p is parameter)
        its_options = {**options, **names_of(group, [number])}
        if record.state_stays:
            with signals_deferred, torch._C.DisableTorchFunctionSubclass():
                self._step_in_memory([{**its_options, "params": [parameter]}], context)
                record.spent_norm, record.spent_options = norm, options
                record.refresh(parameter)
        else:
            with signals_deferred:
                record.spent_norm, record.spent_options = norm, options
                record.update = Update(context, its_options, None, ())
                record.refresh(parameter)
            self.finish_record(record)
        set_gradient(parameter, None)


def _comes_once(record: Record) -> bool:
    """Whether this gradient is all that backward adds up, also of a block that reentrant checkpoints use more than once: the
    first step shows it.
    """
    if not _is_in_checkpoint():
        return True
    record.arrivals += 1
    return record.comes_once


def _is_in_checkpoint() -> bool:
    """Whether a backward inside of the backward is on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CHECKPOINT:
        frame = frame.f_back
    return frame is not None
