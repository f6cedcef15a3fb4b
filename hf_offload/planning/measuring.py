"""Measuring a footprint: one real training step, observed while the engine offloads."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from hf_offload.checkpointing import in_recompute
from hf_offload.engine.record import Record
from hf_offload.plan.footprint import Footprint, Segment
from hf_offload.planning.recorder import StepRecorder
from hf_offload.planning.saved_times import MeasuredMicroBatch, SavedTimes, SmallSaved
from hf_offload.planning.state_bytes import missing_state, own_ids, state_of, trains_any
from hf_offload.planning.step_time import ComputeClock
from hf_offload.state.gradients import has_gradient
from hf_offload.state.registry import observers, parked_of
from hf_offload.state.weights import weights_of
from hf_offload.tensors import nbytes_of, parameter_count


class StepMeter(StepRecorder):
    """Observes one step of a training that offloads, each of its micro-batches for itself.

    ``resident_bytes`` says how many bytes of saved tensors the engine holds in memory, ``waited_s`` how long it has kept the
    training waiting in all: neither is the model's doing. ``state_bytes`` says how many the optimizers hold. ``on_step`` is
    called after each step of an optimizer.

    A step ends with the last optimizer's step: what follows before the next forward with gradients is not part of it. Nor is
    evaluation, a forward without gradients while no backward is awaited, and what follows it until training goes on.

    Attributes:
        is_shared: Whether another thread ran a part of it, of whose operations nothing is known.
        measured: The micro-batches that have ended.
    """

    def __init__(
        self,
        model: nn.Module,
        resident_bytes: Callable[[], int],
        waited_s: Callable[[], float],
        state_bytes: Callable[[], int],
        on_step: Callable[[torch.optim.Optimizer], None] | None = None,
    ):
        super().__init__(model)
        self._resident_bytes = resident_bytes
        self._find_state_bytes = state_bytes
        self._on_step = on_step
        self._state_bytes = self._state_before = 0
        self._optimizer_live = 0  # at most while an optimizer steps, behind backward
        self._saved_times = SavedTimes()
        self._small = SmallSaved()
        self._min_bytes = 0
        self._clock = ComputeClock(self._device, waited_s, self._own)
        self._optimizing = self._back = False
        self._before_optimizing = (0, 0, 0)  # live bytes, those of the running segment, the peak
        self._optimizer_s = 0.0
        self._optimizer_bytes = 0
        self._missing_state_bytes: dict[int, int] = {}  # by optimizer's id
        self.measured: list[MeasuredMicroBatch] = []
        self._is_paused = False
        self._begun = self._accumulates = False
        self._on_stack = self.is_shared = False
        self._walk = -1  # autograd's number of the latest backward
        self._unended = 0  # walks that have begun and not ended

    # -- the step -----------------------------------------------------------------------------------------------------

    def begin(self, resident: Iterable[torch.UntypedStorage] = ()) -> None:
        """Observe from now on. ``resident`` are the storages of saved tensors that the engine holds in memory already."""
        self._state_before = self._find_state_bytes()
        self.watch()
        observers.add(self)
        for storage in resident:  # of graphs that are still alive: they were broken off, or the user holds them
            self.see(storage)
        self._handles += [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self.__enter__()
        self._on_stack = True
        self._clock.elapsed()

    def end(self) -> None:
        """Stop observing. Idempotent."""
        if not self.is_recording:
            return
        self.is_recording = False
        gone = self._model_ref() is None
        self.leave()
        self.unwatch()
        observers.discard(self)
        if not gone:
            if not self._optimizing:
                self.end_segment()
            self._close_micro_batch()
            self._state_bytes = self._find_state_bytes()

    def leave(self) -> None:
        """Take the mode off this thread's stack if it is on top of it. For a model that has gone: takes no lock, and may be
        called wherever the garbage collector may run.
        """
        if self._on_stack and _get_current_dispatch_mode() is self:
            self._on_stack = False
            self.__exit__(None, None, None)

    @staticmethod
    def can_begin() -> bool:
        """Whether this thread's stack of modes is empty: one that is left while ours is on top of it would take ours off."""
        mode = _get_current_dispatch_mode()
        while isinstance(mode, StepMeter) and not mode.is_recording:  # its step ended in another thread
            mode.leave()
            mode = _get_current_dispatch_mode()
        return mode is None

    def begin_forward(self, inputs: Iterable[torch.Tensor], is_next: bool) -> None:
        """A forward of the whole model begins with ``inputs``; ``is_next``: that of the next micro-batch."""
        self._see_inputs(inputs)
        self._resume()
        if is_next:
            self._see_gradients()
            self.end_segment()
            if self._begun:
                self._close_micro_batch()
            self._begun = True
            self._accumulates = any(
                has_gradient(parameter) for parameter in self.model.parameters() if parameter.is_leaf
            )
            self.segments.clear()
            self._saved_times = SavedTimes()
            self._small = SmallSaved()
            self._entered.clear()
            self._left.clear()
            self.backward = False
            self.peak_live_bytes = self._live

    def _see_inputs(self, inputs: Iterable[torch.Tensor]) -> None:
        for tensor in inputs:
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device == self._device:
                self.see(tensor.untyped_storage())

    def begin_evaluation(self) -> None:
        """A forward without gradients begins. What comes is not part of the step until training goes on, unless the backward
        of this micro-batch is still to come: the forward may be of a reference that its loss is compared with.
        """
        if not self._begun or self._has_backward:
            self._pause()

    def _pause(self) -> None:
        if not self._is_paused:
            self.end_segment()
            self._is_paused = True

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._clean_up()
            self._most = self._most_measured = self._live - self.elsewhere()
            self.elapsed()

    @property
    def _has_backward(self) -> bool:
        return self.backward or bool(self._reached)

    def _close_micro_batch(self) -> None:
        # Weights that had no part in this micro-batch may have one in the next: a layer that was skipped, an expert.
        missing = sum(
            nbytes_of(parameter)
            for parameter in self.model.parameters()
            if parameter.requires_grad and not has_gradient(parameter) and id(parameter) not in self._reached
        )
        has_backward = self._has_backward
        self._reached.clear()
        times = self._saved_times
        segments = tuple(times.counted_in(self.segments, missing))
        saved = tuple(times.saved(len(self.segments)))
        blocks = tuple(
            dataclasses.replace(span, small_bytes=self._small.alone_bytes.get(span.name, 0))
            for span in self.block_spans()
        )
        skipped = tuple(sorted(self._blocks - self._left.keys()))
        self.measured.append(
            MeasuredMicroBatch(
                segments,
                saved,
                blocks,
                self.peak_live_bytes,
                skipped,
                self._accumulates,
                has_backward,
                times.walks_again,
                self._small.most_bytes,
            )
        )

    @property
    def micro_batches(self) -> int:
        """How many have begun."""
        return len(self.measured) + (self.is_recording and self._begun)

    # -- the engine's events ------------------------------------------------------------------------------------------

    def _is_here(self) -> bool:
        """Whether this thread is the one whose operations are seen, or one of autograd's that works for it."""
        is_here = any(mode is self for mode in _get_current_dispatch_mode_stack())
        self.is_shared = self.is_shared or not is_here
        return is_here

    def packed(self, record: Record) -> None:
        """A tensor was saved."""
        if not self._is_here():
            return
        unit = record.unit if record.unit in self.units else next(iter(self.units))
        self._saved_times.packed(record, unit, self.end_segment())

    def left(self, tensor: torch.Tensor, min_bytes: int) -> None:
        """A tensor was saved that stays in memory, since it is smaller than ``min_bytes``."""
        if not self._is_here():
            return
        self._min_bytes = min_bytes
        key = id(tensor.untyped_storage())
        if key in self._seen:  # no weight
            self._small.saved(key, tensor.nbytes, self.units[self.unit])

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if self._is_here() and not self._is_paused:
            super()._enter(name, module, args, kwargs)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_here() or self._is_paused:
            return
        super()._leave(name, module, args, output)
        if name in self._blocks and not in_recompute():
            self._small.end_block(name, self._seen)

    def asked(self, record: Record) -> None:
        """Backward is about to use a saved tensor."""
        if not self._is_here():
            return
        self._note_walk()
        self._resume()
        now = self.end_segment()
        self.backward = True
        unit = self._saved_times.asked(record, now, self._walk)
        self.unit = self.unit if unit is None else unit

    def _note_walk(self) -> None:
        """Note which backward runs, and ask autograd to say when it has ended: it does not where an error has ended it."""
        walk, before = torch._C._current_graph_task_id(), self._walk
        self._walk = walk
        if walk not in (-1, before):
            self._unended += 1
            torch.autograd.Variable._execution_engine.queue_callback(self._walk_ended)

    def _walk_ended(self) -> None:
        self._unended -= 1

    @property
    def is_broken_off(self) -> bool:
        """Whether a backward has ended with an error."""
        return self._unended > 0 and torch._C._current_graph_task_id() == -1

    # -- what the recorder asks ---------------------------------------------------------------------------------------

    def _count_gradient(self, parameter: torch.Tensor) -> None:
        if self._is_here():
            self._resume()
            super()._count_gradient(parameter)

    def _reach(self, needed: int, elsewhere: int, spared: int = 0) -> None:
        if not self._is_paused:
            super()._reach(needed, elsewhere, spared)

    def end_segment(self) -> int:
        if self._is_paused:
            self._clean_up()
            return len(self.segments)
        now = super().end_segment()
        self._saved_times.settle(now)
        return now

    def died(self, key: int) -> None:
        self._small.died(key)
        self._saved_times.died(key, len(self.segments))

    def elapsed(self) -> float:
        return self._clock.elapsed()

    def elsewhere(self) -> int:
        return self._resident_bytes()

    # -- the optimizer ------------------------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._model_ref() is None:
            self.leave()  # where the model went, something else may have been on top
            return
        for state in state_of(optimizer):
            self.know(state.untyped_storage())  # it was there before
        if not trains_any(optimizer, own_ids(self.model)):
            return  # this step goes on
        self._resume()
        self._back = self._see_gradients() > 0 or self._back
        self.end_segment()
        self._optimizing = True
        self._before_optimizing = (self._live, self._most, self.peak_live_bytes)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._model_ref() is None:
            return
        if self._on_step is not None:
            self._on_step(optimizer)
        self._clean_up()
        own = own_ids(self.model)
        if not trains_any(optimizer, own):
            for state in state_of(optimizer):
                self.forget(state.untyped_storage())
            return
        if self._optimizing:  # else the whole step ran inside of the optimizer's, in a closure
            live, least, peak = self._before_optimizing
            needed = max(0, self._most - least - max(0, self._live - live))
            seconds = self.elapsed()
            if torch._C._current_graph_task_id() != -1:  # a weight is updated while others wait for their gradients
                self.segments.append(Segment(self.unit, True, max(0, least + needed), self._gradients, seconds, 0))
                self.peak_live_bytes = max(peak, live + needed)
            else:
                self._optimizer_s += seconds
                self._optimizer_bytes = max(self._optimizer_bytes, needed)
                self._optimizer_live = max(self._optimizer_live, live + needed)
                self.peak_live_bytes = peak
        self._optimizing = True
        self._missing_state_bytes[id(optimizer)] = missing_state(optimizer, own)
        for state in state_of(optimizer):
            self.forget(state.untyped_storage())  # what has come is counted as state from now on
        self._most = self._most_measured = self._live - self.elsewhere()
        if torch._C._current_graph_task_id() == -1:
            self._pause()  # what comes before the next step is a part of none

    @property
    def is_over(self) -> bool:
        """Whether the optimizer has stepped, so that the next forward belongs to another step."""
        return self._optimizing

    def peak_bytes(self, micro_batch: int) -> int:
        """Most bytes of tensors alive at once in a micro-batch, weights and optimizer state included: all state that there
        is when the step ends, as in the next one.
        """
        return self._base_bytes() + max(self.measured[micro_batch].peak_live_bytes, self._stepping(micro_batch))

    def taken_bytes(self, micro_batch: int) -> int:
        """The same with the state that there was: in a first step, it comes when backward has ended."""
        before = self._base_bytes() - max(0, self._state_bytes - self._state_before)
        most = before + self.measured[micro_batch].peak_live_bytes
        return max(most, self._base_bytes() + stepping) if (stepping := self._stepping(micro_batch)) else most

    def _stepping(self, micro_batch: int) -> int:
        """Live bytes of an optimizer's step, which follows the last micro-batch."""
        return self._optimizer_live if micro_batch == len(self.measured) - 1 else 0

    # -- what was found -----------------------------------------------------------------------------------------------

    def _base_bytes(self) -> int:
        residency = weights_of(self.model)
        resident = (p for p in self.model.parameters() if parked_of(p) is None)
        weights = sum(nbytes_of(tensor) for tensor in {*resident, *self.model.buffers()})
        return weights + (0 if residency is None else residency.budget_bytes) + self._state_bytes

    def footprint(self, micro_batch: int) -> Footprint:
        """One micro-batch of the step that was observed."""
        found = self.measured[micro_batch]
        gradients = sum(
            nbytes_of(tensor)
            for tensor in self.model.parameters()
            if tensor.requires_grad and id(tensor) not in self._used_up
        )
        missing = sum(self._missing_state_bytes.values())
        return Footprint(
            segments=found.segments,
            saved=found.saved,
            blocks=found.blocks,
            units=self.units,
            classes=self.classes,
            parameters=parameter_count(self.model),
            base_bytes=self._base_bytes() + missing,
            gradient_bytes=gradients,
            optimizer_step_bytes=self._optimizer_bytes,
            optimizer_step_s=self._optimizer_s,
            source="measured",
            head=self.head,
            tiled=(self.head,) if self.is_tiled else (),
            state_bytes=self._state_bytes + missing,
            min_bytes=self._min_bytes,
            small_bytes=found.small_bytes,
            skipped_blocks=found.skipped_blocks,
            accumulates=found.accumulates,
            looks_at_gradients=self._back,
        )
