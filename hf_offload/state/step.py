"""Steps of an optimizer whose state, and the gradients it needs, leave memory.

Note: one rule for all schedules
    A step notes for each parameter the options of its group and its gradient as they are now: an :class:`Update`. The
    parameter owes it until it is computed: at once, or where the loop ``defers`` updates, when the parameter's unit is used
    next, or an operation reads the parameter, its gradient or its state, unless others hold the parameter's memory, who would
    read it without asking. A failure or Ctrl-C between two parts leaves the rest owed: the next use completes it, or raises.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hf_offload.errors import OffloadError, StorageError
from hf_offload.interrupts import signals_deferred
from hf_offload.state import guard
from hf_offload.state.contexts import StepContext, is_outside, outside
from hf_offload.state.gradients import (
    gradient_of,
    norm_of,
    park_gradient,
    set_gradient,
    watch,
)
from hf_offload.state.parameter import StreamedParameter, is_whole_gradient
from hf_offload.state.registry import is_held, parked_of
from hf_offload.state.shadow import Shadow, attributes_of, names_of, options_of
from hf_offload.state.units import note_backward, pinned, stepping, unit_with
from hf_offload.state.update import Update, UpdateComputer, state_may_leave, state_tensors
from hf_offload.state.weights import ParkedWeight
from hf_offload.storage.service import GRADIENTS, OPTIMIZER_STATE
from hf_offload.storage.store import Store
from hf_offload.tensors import nbytes_of

logger = logging.getLogger(__name__)


class Streaming:
    """State and gradients of the parameters of one optimizer.

    Args:
        optimizer: It.
        shadow: Computes the updates.
        state_store, gradient_store: Where they go; None leaves gradients in memory.
        smallest_bytes: Smaller parameters are not moved.
        part_bytes: Size of the parts that parameters are cut into; None leaves them whole.
        must_stream: Whether a gradient that cannot leave memory is an error.
        whole: Whether the optimizer's own ``step()`` runs as it is.

    Attributes:
        in_backward: Whether each parameter is updated as soon as it has a gradient, from the options of that moment. The
            caller promises one backward a step, and that nothing changes gradients in between.
        defers: Whether updates wait for the next use of their parameter, as
            :meth:`~hf_offload.session.OffloadSession.defer_updates` says.
        wants_norms: Whether gradients are measured as they leave memory, for clipping.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shadow: Shadow,
        state_store: Store,
        gradient_store: Store | None,
        *,
        smallest_bytes: int,
        part_bytes: int | None,
        must_stream: bool,
        whole: bool,
    ):
        self.in_backward = False
        self.defers = False
        self.whole = whole
        self.wants_norms = False
        self.state_store = state_store
        self.gradient_store = gradient_store
        self._optimizer = weakref.ref(optimizer)
        self.shadow = shadow
        self._updates = UpdateComputer(shadow, state_store, part_bytes)
        self._smallest_bytes = smallest_bytes
        self._must_stream = must_stream
        self._has_begun = False  # the step, by a backward
        self._entries: set[int] = set()  # ids of the keys of the state, before the present step
        self._trained: dict[int, StreamedParameter] = {}

    # -- parameters ---------------------------------------------------------------------------------------------------------

    def add(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Move state and gradients of these parameters from now on, as far as they are large enough and plain."""
        for name, parameter in parameters:
            trains = parameter.is_floating_point() or parameter.is_complex()
            plain = guard.own_class(parameter) is nn.Parameter and not hasattr(parameter, "__tensor_flatten__")
            if not plain or not trains or nbytes_of(parameter) < self._smallest_bytes:
                continue
            trained = StreamedParameter(parameter, name, self)
            self._trained[id(parameter)] = trained
            if self.gradient_store is not None:
                before, arrived = _weak(trained, self.before_accumulation), _weak(trained, self.arrived)
                watch(parameter, before, arrived)
            unit = unit_with(parameter)
            if unit is not None:
                unit[1].owed_updates[id(self), id(parameter)] = trained
            self.park_state(parameter)

    def streamed_of(self, parameter: Tensor) -> StreamedParameter | None:
        """What is known of a parameter whose state moves."""
        found = self._trained.get(id(parameter))
        return found if found is not None and found.parameter_ref() is parameter else None

    def moves(self, parameter: Tensor) -> bool:
        """Whether its state and gradients leave memory now."""
        return self.streamed_of(parameter) is not None and id(parameter) not in self._updates.staying

    @signals_deferred
    def let_stay(self, parameters: Iterable[Tensor]) -> None:
        """State and gradients of these are in memory from now on, and those of all others leave it again. Between steps."""
        wanted = {id(parameter) for parameter in parameters}
        with self._section():
            for trained in self.records:
                parameter = trained.parameter_ref()
                assert parameter is not None
                if id(parameter) in wanted and self.moves(parameter):
                    self.finish([trained])
                    for tensor in (*self.state_tensors(parameter), gradient_of(parameter)):
                        parked = None if tensor is None else parked_of(tensor)
                        if parked is not None:
                            guard.settle([tensor])
                            parked.come()
                            parked.unmanage()
            left, self._updates.staying = self._updates.staying - wanted, wanted & self._trained.keys()
            for key in left:
                parameter = self._trained[key].parameter_ref()
                if parameter is not None:
                    self.park_state(parameter)

    @property
    def records(self) -> list[StreamedParameter]:
        """Those of all parameters that are still there."""
        return [one for one in self._trained.values() if one.parameter_ref() is not None]

    @property
    def streams_gradients(self) -> bool:
        """Whether gradients leave memory."""
        return self.gradient_store is not None

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all groups."""
        optimizer = self._optimizer()
        return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]

    # -- state --------------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[Any, Any]:
        """The optimizer's, as it is."""
        optimizer = self._optimizer()
        return {} if optimizer is None else vars(optimizer)["state"]

    def state_tensors(self, parameter: Tensor) -> list[Tensor]:
        """The tensors of its present state that may leave memory."""
        return state_tensors(self.state, parameter)

    def park_state(self, parameter: Tensor) -> None:
        """Let its present state leave memory."""
        trained = self.streamed_of(parameter)
        self._updates.park(parameter, "" if trained is None else trained.name, self.state)

    def spans(self, parameter: Tensor, update: Update | None = None) -> list[tuple[int, int]] | None:
        """Ranges of the parameter's bytes that an ``update`` computes one after the other; None for all at once."""
        state, gradient = (self.state, None) if update is None else (update.state, update.gradient)
        return self._updates.spans(parameter, state, gradient)

    # -- gradients ----------------------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def before_accumulation(self, trained: StreamedParameter, _: Tensor) -> None:
        """A gradient is about to be added to what is in ``.grad``."""
        parameter = trained.parameter_ref()
        gradient = None if parameter is None else gradient_of(parameter)
        if gradient is not None:
            with self._section(GRADIENTS), outside():
                guard.settle([gradient])  # an update that waits for it, too

    @torch._disable_dynamo
    def arrived(self, trained: StreamedParameter, parameter: Tensor) -> None:
        """Backward has put or added a gradient: it leaves memory."""
        gradient = gradient_of(parameter)
        if gradient is None or self.streamed_of(parameter) is not trained or self._optimizer() is None:
            return
        if trained.update is not None:
            if trained.update.gradient is gradient:
                return  # a hook of the user has stepped
            raise OffloadError(
                f"{trained.name} has got a gradient, while the update of the last step is not computed yet: a forward has "
                "used its former value. Use it by its module, or read it from the module before."
            )
        note_backward()
        with self._section(GRADIENTS), outside():
            if gradient.layout is not torch.strided:
                self._refuse_sparse(trained)
            elif self.in_backward and is_whole_gradient(trained):
                self._update_in_backward(trained, parameter, gradient)
            elif self.moves(parameter) and state_may_leave(gradient, self._smallest_bytes):
                assert self.gradient_store is not None
                park_gradient(
                    gradient, f"the gradient of {trained.name}", self.gradient_store, self.wants_norms and is_outside()
                )

    def _refuse_sparse(self, trained: StreamedParameter) -> None:
        if self._must_stream and not self.whole:
            raise OffloadError(
                f"The gradient of {trained.name} is sparse, which cannot be streamed: make the embedding with sparse=False, "
                "or set optimizer='none'."
            )

    def _update_in_backward(self, trained: StreamedParameter, parameter: Tensor, gradient: Tensor) -> None:
        if trained.norm_in_backward is not None:
            raise OffloadError(
                f"{trained.name} has got a second gradient before the optimizer's step, and was updated with the first one: "
                "its value is not that of any step. Go on from a checkpoint, without update_in_backward."
            )
        if not self._has_begun:
            self._has_begun, self._entries = True, set(map(id, self.state))
        optimizer = self._optimizer()
        assert optimizer is not None
        group, number = _group_of(optimizer, parameter)
        options = options_of(group)
        context = StepContext(attributes_of(optimizer), torch.get_default_dtype())
        norm = norm_of(gradient, 2.0)
        trained.update = Update(self.state, context, {**options, **names_of(group, [number])}, gradient)
        set_gradient(parameter, None)
        self.finish([trained])
        trained.norm_in_backward, trained.options_in_backward = norm, options
        guard.put(parameter, trained)

    # -- steps --------------------------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    @signals_deferred
    def step(self, optimizer: Optimizer) -> None:
        """One step of all parameters that have a gradient.

        Raises :class:`~hf_offload.errors.StorageError` if something cannot be read: the step can then be completed, or no
        parameter that is not complete can be used.
        """
        with self._section(), torch.no_grad(), stepping():
            self.finish()
            for debt in [debt for parameter in self.parameters() for debt in guard.debts_of(parameter)]:
                if isinstance(debt, StreamedParameter):
                    debt.finish()  # of another optimizer of the same weights, which came first
            if not self._has_begun:
                self._entries = set(map(id, self.state))
            self._has_begun = False
            context = StepContext(attributes_of(optimizer), torch.get_default_dtype())
            in_memory: list[dict[str, Any]] = []
            noted: list[tuple[StreamedParameter, Update]] = []
            for group in optimizer.param_groups:
                options = options_of(group)
                staying: list[int] = []
                for number, parameter in enumerate(group["params"]):
                    trained, gradient = self.streamed_of(parameter), gradient_of(parameter)
                    if trained is not None:
                        trained.check_step(options)
                        trained.end_backward()
                    if gradient is None:
                        continue
                    if trained is None or not self.moves(parameter) or gradient.layout is not torch.strided:
                        staying.append(number)
                        continue
                    named = {**options, **names_of(group, [number])}
                    noted.append((trained, Update(self.state, context, named, gradient)))
                if staying:
                    params = [group["params"][number] for number in staying]
                    in_memory.append({**options, **names_of(group, staying), "params": params})
            self._step_in_memory(in_memory, context)
            models = {found[0] for found in map(unit_with, self.parameters()) if found is not None}
            may_wait = self.defers and is_outside() and not any(model.is_compiled for model in models)
            at_once: list[StreamedParameter] = []
            for trained, update in noted:
                waits = may_wait and self._may_wait(trained, update)
                trained.update = update
                if waits:
                    self._put_off(trained, update)
                else:
                    at_once.append(trained)
            self.finish(at_once, contextlib.nullcontext())
            self._sort_state()
            for model in models:
                model.read_ahead_for_updates()

    def _sort_state(self) -> None:
        """What a step has put into the state comes in the order of the groups, as in memory."""
        state = self.state
        new = [key for key in state if id(key) not in self._entries]
        places = {id(parameter): place for place, parameter in enumerate(self.parameters())}
        for key in sorted(new, key=lambda key: places.get(id(key), -1)):
            state[key] = state.pop(key)

    def _may_wait(self, trained: StreamedParameter, update: Update) -> bool:
        """Whether no code is known that could read the parameter without asking."""
        parameter = trained.parameter_ref()
        found = None if parameter is None else unit_with(parameter)
        if parameter is None or found is None or not found[1].was_called:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            # which in-place operations refuse
            if torch._debug_has_internal_overlap(parameter) != 0:
                return False
            state = tree_leaves(self.state.get(parameter) or {})
            layout, trained.layout = trained.layout, (parameter.shape, parameter.dtype)
            if not state or layout != trained.layout:
                return False  # who holds the optimizer's state sees that it comes; errors belong to the step
            known = [parameter, update.gradient, *(one for one in state if isinstance(one, Tensor))]
            return not any(is_held(one) for one in known)

    def _put_off(self, trained: StreamedParameter, update: Update) -> None:
        parameter = trained.parameter_ref()
        assert parameter is not None
        parked = parked_of(parameter)
        if isinstance(parked, ParkedWeight):
            parked.count_change(parameter)  # it need not be written for that
        else:
            torch.autograd.graph.increment_version(parameter)
        update.counted = 1
        self._guard(trained)

    def _concerned(self, parameter: Tensor, update: Update) -> list[Tensor]:
        """The other tensors of an update."""
        state = tree_leaves(update.state.get(parameter) or {})
        return [update.gradient, *(one for one in state if isinstance(one, Tensor))]

    def _guard(self, trained: StreamedParameter) -> None:
        parameter, update = trained.parameter_ref(), trained.update
        if parameter is not None and update is not None:
            guard.put(parameter, trained)
            for tensor in self._concerned(parameter, update):
                guard.put(tensor, trained.of_others)

    def _lift(self, trained: StreamedParameter, update: Update) -> None:
        parameter = trained.parameter_ref()
        if parameter is not None:
            guard.lift(parameter, trained)
            for tensor in self._concerned(parameter, update):
                guard.lift(tensor, trained.of_others)

    def _give_up(self, trained: StreamedParameter) -> None:
        if trained.update is not None:
            self._lift(trained, trained.update)
            trained.update = None

    def _step_in_memory(self, groups: list[dict[str, Any]], context: StepContext) -> None:
        if not groups:
            return
        parameters = [p for group in groups for p in group["params"]]
        guard.settle([g for p in parameters if (g := gradient_of(p)) is not None])
        state = self.state
        before = {p: state[p] for p in parameters if p in state}
        away = [p for p in parameters if not p.is_cpu]  # on a CPU, what is away can be read
        with self._section(None), pinned(away, finishes=False):
            state.update(self.shadow.step(groups, before, context.attributes))

    def finish(
        self,
        which: Iterable[StreamedParameter] | None = None,
        context: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        """Compute the updates that parameters owe, by default those of all: as at their steps, whatever this thread does, or
        in another ``context``.
        """
        owing = [one for one in (self.records if which is None else which) if one.update is not None]
        with stepping() if len(owing) > 1 else contextlib.nullcontext():
            for number, trained in enumerate(owing):
                parameter, update = trained.parameter_ref(), trained.update
                if parameter is None or update is None:
                    continue
                for coming in owing[number + 1 : number + 3]:
                    coming.read_ahead()
                try:
                    with (
                        signals_deferred,
                        self._section(),
                        update.context.restored() if context is None else context,
                        torch.no_grad(),
                    ):
                        self._lift(trained, update)
                        trained.is_read = False
                        trained.update = None  # from here on, it is the update itself that reads the parameter
                        try:
                            with pinned([parameter], finishes=False), torch._C.DisableTorchFunctionSubclass():
                                self._updates.compute(parameter, trained.name, update, trained.read_ahead)
                        except BaseException:
                            if update.is_given_up:  # in memory, nothing is stepped after it
                                for other in owing[number + 1 :]:
                                    self._give_up(other)
                            else:
                                trained.update = update
                            for other in owing[number:]:
                                self._guard(other)
                            raise
                except StorageError as error:
                    raise StorageError(
                        f"The last step of {trained.name} cannot be completed, so its value must not be used: go on from the "
                        f"last checkpoint. {error}"
                    ) from error

    def _section(self, kind: str | None = OPTIMIZER_STATE) -> contextlib.AbstractContextManager[Any]:
        return self.state_store.storage.handling.of(kind)


def _group_of(optimizer: Optimizer, parameter: Tensor) -> tuple[dict[str, Any], int]:
    for group in optimizer.param_groups:
        for number, one in enumerate(group["params"]):
            if one is parameter:
                return group, number
    raise AssertionError("its gradient is watched because it is in a group")


def _weak(trained: StreamedParameter, call: Callable[[StreamedParameter, Tensor], None]) -> Callable[[Tensor], None]:
    """A hook that a parameter holds, and that does not hold the streaming."""
    reference = weakref.ref(trained)
    method = weakref.WeakMethod(call)

    def called(tensor: Tensor) -> None:
        found, its = method(), reference()
        if found is not None and its is not None:
            found(its, tensor)

    return called
