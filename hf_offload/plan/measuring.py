"""Measuring a footprint: one real training step, observed while the engine offloads."""

import dataclasses
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.hooks import RemovableHandle

from hf_offload.plan.footprint import Footprint, Moment, Saved
from hf_offload.plan.recorder import StepRecorder, nbytes_of


class ObservedRecord(Protocol):
    """What the engine shows of a record. ``buffer`` is None when it holds no memory."""

    unit: str
    nbytes: int
    buffer: torch.Tensor | None
    storage_ref: "weakref.ref[torch.UntypedStorage]"


@dataclasses.dataclass(slots=True)
class _Times:
    unit: str
    nbytes: int
    packed: int
    needed: int | None = None
    last: int | None = None  # the last time backward asked for it
    dropped: int | None = None  # when the engine let go of the memory it was saved from
    died: int | None = None  # when everybody had


class StepMeter(StepRecorder):
    """Observes one step of a training that offloads, the last micro-batch of it if there are several.

    ``resident_bytes`` says how many bytes of saved tensors the engine holds in memory, ``waited_s`` how long it has kept the
    training waiting in all: neither is the model's doing.
    """

    def __init__(self, model: nn.Module, resident_bytes: Callable[[], int], waited_s: Callable[[], float]):
        super().__init__(model)
        self._resident_bytes = resident_bytes
        self._waited_s = waited_s
        self._times: dict[int, _Times] = {}
        self._records: dict[int, weakref.ref[Any]] = {}  # by id, which may be used again
        self._held: list[tuple[weakref.ref[Any], _Times]] = []
        self._by_storage: dict[int, list[_Times]] = {}
        self._clock = self._now()
        self._optimizer_hooks: list[RemovableHandle] = []
        self._optimizing = False
        self._before_live = 0
        self._optimizer_s = 0.0
        self._optimizer_bytes = 0
        self._state_bytes: dict[int, int] = {}
        self.micro_batches = 0
        self.running = False
        self._on_stack = False

    # -- the step -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Observe from now on."""
        self.running = True
        self.watch()
        self._optimizer_hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self.__enter__()
        self._on_stack = True
        self._clock = self._now()

    def end(self) -> None:
        """Stop observing. Idempotent."""
        if not self.running:
            return
        self.running = False
        gone = self._model_ref() is None
        if gone:
            self.leave()
        else:
            self._on_stack = False
            self.__exit__(None, None, None)
        self.unwatch()
        for handle in self._optimizer_hooks:
            handle.remove()
        if not self._optimizing and not gone:
            self.end_moment()

    def leave(self) -> None:
        """Take the mode off this thread's stack if it is on top of it. For a model that has gone: takes no lock, and may be
        called wherever the garbage collector may run.
        """
        if self._on_stack and _get_current_dispatch_mode() is self:
            self._on_stack = False
            self.__exit__(None, None, None)

    def begin_forward(self) -> None:
        """The model's forward begins: the first, or that of another micro-batch."""
        if self.backward or not self.micro_batches:
            self.end_moment()
            self.moments.clear()
            self._times.clear()
            self._records.clear()
            self._held.clear()
            self._by_storage.clear()
            self._entered.clear()
            self._left.clear()
            self.backward = False
            self.micro_batches += 1

    # -- the engine's events ------------------------------------------------------------------------------------------

    def packed(self, record: ObservedRecord) -> None:
        """A tensor was saved."""
        unit = record.unit if record.unit in self.units else next(iter(self.units))
        times = self._times[id(record)] = _Times(unit, record.nbytes, self.end_moment())
        self._records[id(record)] = reference = weakref.ref(record)
        self._held.append((reference, times))
        storage = record.storage_ref()
        if storage is not None:
            self._by_storage.setdefault(id(storage), []).append(times)

    def asked(self, record: ObservedRecord) -> None:
        """Backward is about to use a saved tensor."""
        times, known = self._times.get(id(record)), self._records.get(id(record))
        now = self.end_moment()
        self.backward = True
        if times is not None:
            self.unit = times.unit
        if times is not None and known is not None and known() is record:
            times.last = now
            if times.needed is None:
                times.needed = now

    # -- what the recorder asks ---------------------------------------------------------------------------------------

    def end_moment(self) -> int:
        now = super().end_moment()
        still = []
        for reference, times in self._held:
            record = reference()
            if record is None or record.buffer is None or times.needed is not None:
                times.dropped = now
            else:
                still.append((reference, times))
        self._held = still
        return now

    def died(self, key: int) -> None:
        for times in self._by_storage.pop(key, ()):
            times.died = len(self.moments)

    def elapsed(self) -> float:
        now = self._now()
        seconds, self._clock = now - self._clock, now
        return max(0.0, seconds)

    def elsewhere(self) -> int:
        return self._resident_bytes()

    def _now(self) -> float:
        if self._device.type != "cpu":
            # Kernels run behind the host's back: what they take is known when they are done.
            torch.accelerator.synchronize(self._device)
        return time.perf_counter() - self._waited_s() - self.bookkeeping_s

    # -- the optimizer ------------------------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._model_ref() is None:
            self.leave()  # where the model went, something else may have been on top
            return
        self.end_moment()
        self._optimizing = True
        for state in _state_of(optimizer):
            self._known.add(id(state.untyped_storage()))  # it was there before
        self._before_live = self._live

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._model_ref() is None:
            return
        # By storage, whose object lives as long as it does: an optimizer inside of another one has the same state.
        state = {id(tensor.untyped_storage()): nbytes_of(tensor) for tensor in _state_of(optimizer) if tensor.dim() > 0}
        self._bury()
        grown = self._live - self._before_live
        self._optimizer_s += self.elapsed()
        self._optimizer_bytes = max(self._optimizer_bytes, self._most - self._before_live - max(0, grown))
        self._state_bytes |= state

    @property
    def is_over(self) -> bool:
        """Whether the optimizer has stepped, so that the next forward belongs to another step."""
        return self._optimizing

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors alive at once, weights and optimizer state included."""
        weights = sum(nbytes_of(tensor) for tensor in {*self.model.parameters(), *self.model.buffers()})
        return weights + sum(self._state_bytes.values()) + self.peak_live_bytes

    # -- what was found -----------------------------------------------------------------------------------------------

    def footprint(self) -> Footprint:
        """The step that was observed."""
        weights = sum(nbytes_of(tensor) for tensor in {*self.model.parameters(), *self.model.buffers()})
        gradients = sum(nbytes_of(tensor) for tensor in self.model.parameters() if tensor.requires_grad)
        return Footprint(
            moments=tuple(self._moments()),
            saved=tuple(self._saved()),
            blocks=tuple(self.block_spans()),
            units=self.units,
            kinds=self.kinds,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            base_bytes=weights + sum(self._state_bytes.values()),
            gradient_bytes=gradients,
            optimizer_step_bytes=max(0, self._optimizer_bytes),
            optimizer_step_s=self._optimizer_s,
            source="measured",
        )

    def _saved(self) -> Iterator[Saved]:
        end = len(self.moments)
        order = sorted({times.last for times in self._times.values() if times.last is not None})
        following = dict(zip(order, [*order[1:], end], strict=False))  # nothing follows where nothing was asked for
        for times in self._times.values():
            needed = end if times.needed is None else times.needed
            # Autograd lets go when the operation that asked has run: at the latest when the next one asks.
            released = end if times.last is None else following[times.last]
            gone = self._gone(times)
            yield Saved(times.unit, times.nbytes, times.packed, gone, needed, max(released, needed + 1))

    def _gone(self, times: _Times) -> int:
        """The first moment in which nothing but autograd would have held it, had it stayed in memory."""
        end = len(self.moments)
        dropped = end if times.dropped is None else times.dropped
        died = end if times.died is None else times.died
        return died if died > dropped else times.packed

    def _moments(self) -> Iterator[Moment]:
        """The moments, with what somebody else held while the engine held it, too: it was taken for the engine's alone."""
        more = [0] * (len(self.moments) + 1)
        for times in self._times.values():
            if times.dropped is not None and self._gone(times) > times.dropped:
                more[times.packed] += times.nbytes
                more[times.dropped] -= times.nbytes
        for moment, nbytes in zip(self.moments, itertools.accumulate(more), strict=False):
            yield dataclasses.replace(moment, live_bytes=moment.live_bytes + nbytes)


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))
