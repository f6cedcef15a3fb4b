"""Time of training steps: of compute, of moving bytes, and next to what was predicted of them."""

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from hf_offload.engine.hooks import Engine
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.state_placement import ACTIVATIONS, GRADIENTS, STATE, WEIGHTS
from hf_offload.storage.handling import WAITS, Handling
from hf_offload.storage.service import RunStorage

_KINDS = (ACTIVATIONS, WEIGHTS, STATE, GRADIENTS)
# Steps whose median is this far from the prediction correct it. Another plan is looked for after some of them, and each time
# after twice as many: a machine that has other work, too, is now fast and now slow.
_OFF = 1.1
_TIMED_STEPS = 3
_LATEST_STEPS = 5


class Overhead:
    """The time in which the threads of one training do not compute.

    A host that computes itself does nothing else while it prepares what moves: plans count on that for every byte. An
    accelerator's kernels run meanwhile, and wait for bytes alone.
    """

    def __init__(self, engine: Engine, storage: RunStorage, device: str):
        self._engine = engine
        self._storage = storage
        self._on_host = device == "cpu"
        self.begin_step()
        # Kind -> seconds and bytes, of usual steps and of those that were measured.
        self._usual: dict[str, tuple[float, int]] = {}
        self._measured: dict[str, tuple[float, int]] = {}

    def seconds(self) -> float:
        """All of it so far."""
        if self._on_host:
            return self._storage.handling.total_s
        return self._engine.waited_s() + self._storage.handling.seconds(WAITS)

    def begin_step(self) -> None:
        """A step begins: what a new plan has moved since the last one ended belongs to neither."""
        self._before = self._handled()

    def end_step(self, is_measured: bool) -> None:
        """A step has ended. While one is measured, all takes longer."""
        now, before = self._handled(), self._before
        self._before = now
        found = self._measured if is_measured else self._usual
        for kind, handled in now.items():
            found[kind] = _added(found.get(kind, (0.0, 0)), handled, before.get(kind, (0.0, 0)))

    def on(self, hardware: Hardware) -> Hardware:
        """``hardware`` with it, and with the rates that its tiers have reached."""
        store, load = dict(hardware.store_bytes_per_s), dict(hardware.load_bytes_per_s)
        for tier, reached in self._engine.bandwidth().items():
            for rates, rate in zip((store, load), reached, strict=True):
                if rate > 0 and tier in rates:
                    rates[tier] = dataclasses.replace(rates[tier], value=rate, source="measured")
        return dataclasses.replace(hardware, store_bytes_per_s=store, load_bytes_per_s=load, busy_s=self.busy_s)

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds a byte, by kind: of usual steps, but no more than of those that were measured, or a plan that lets nothing
        of a kind move after a step in which the machine was slow would never find out. What has not moved yet is taken to be
        like the others.
        """
        found: dict[str, float] = {}
        all_s, all_bytes = 0.0, 0
        for kind in _KINDS:
            both = [steps.get(kind, (0.0, 0)) for steps in (self._usual, self._measured)]
            each = [(seconds / nbytes, seconds, nbytes) for seconds, nbytes in both if nbytes]
            if each:
                a_byte_s, seconds, nbytes = min(each)
                found[kind] = max(0.0, a_byte_s)
                all_s, all_bytes = all_s + seconds, all_bytes + nbytes
        others = max(0.0, all_s / max(1, all_bytes))
        return {kind: found.get(kind, others) for kind in _KINDS}

    def _handled(self) -> Mapping[str, tuple[float, int]]:
        if not self._on_host:
            return {}
        accounts, handling = self._storage.accounts, self._storage.handling
        return {ACTIVATIONS: self._engine.handled()} | {
            kind: (handling.seconds(kind), sum(one.written_bytes + one.read_bytes for one in accounts[kind].values()))
            for kind in (WEIGHTS, STATE, GRADIENTS)
            if kind in accounts
        }


def _added(found: tuple[float, int], now: tuple[float, int], before: tuple[float, int]) -> tuple[float, int]:
    return found[0] + now[0] - before[0], found[1] + now[1] - before[1]


class StepClock:
    """Times steps: all of one, and what of it was no waiting for bytes, which a plan counts on by itself."""

    def __init__(self, waited_s: Callable[[], float]):
        self._all_waited_s = waited_s
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._waited_s = self._all_waited_at_end_s = 0.0

    def start(self) -> bool:
        """A step begins now, unless one is running. Whether it does."""
        if self._began_s is not None:
            return False
        self._began_s, self._waited_s = time.perf_counter(), self._all_waited_s()
        self._ended_s = None
        return True

    def mark_end(self) -> None:
        """An optimizer has stepped: the step that is running, if any, has ended, unless another one does."""
        if self._began_s is None:
            return
        self._ended_s, self._all_waited_at_end_s = time.perf_counter(), self._all_waited_s()

    def stop(self) -> tuple[float, float] | None:
        """Seconds of the step, and of its compute, until the last optimizer stepped, or until now if none did; None where no
        step was running.
        """
        began = self._began_s
        if began is None:
            return None
        if self._ended_s is None:
            self.mark_end()
        assert self._ended_s is not None
        self._began_s = None
        seconds = self._ended_s - began
        return seconds, seconds - (self._all_waited_at_end_s - self._waited_s)


class Pace:
    """What the latest steps under the present plans took, as ratios to what is predicted."""

    def __init__(self) -> None:
        self._latest: collections.deque[tuple[float, float]] = collections.deque(maxlen=_LATEST_STEPS)
        self._since = 0  # steps since another plan was looked for
        self._patience = _TIMED_STEPS

    def add(self, ratio: float, pace: float) -> None:
        """A step took ``ratio`` times as long as predicted, and its compute ``pace`` times."""
        self._latest.append((ratio, pace))
        self._since += 1

    def take(self) -> tuple[float, float] | None:
        """The ratio and the pace of the latest steps, of which a few may have been slow by chance; None where they took what
        is predicted, and where it is too early for another plan.
        """
        if self._since < self._patience:
            return None
        ratio, pace = map(statistics.median, zip(*self._latest, strict=True))
        if 1 / _OFF <= ratio <= _OFF:
            return None
        self._patience *= 2
        self.forget()
        return ratio, pace

    def forget(self) -> None:
        """There is another plan."""
        self._latest.clear()
        self._since = 0


class ComputeClock:
    """Seconds of compute on a device, from when this is made, without what ``waited_s`` and the ``own`` account say.

    What moves bytes meanwhile takes none of them: copies have ended when the clock starts, and only the compute stream is
    waited for when it stops.
    """

    def __init__(self, device: torch.device, waited_s: Callable[[], float], own: Handling):
        self._device = device
        self._waited_s = waited_s
        self._own = own
        self._began_s = self._now()

    def elapsed(self) -> float:
        """Since this was asked last."""
        if self._device.type == "cpu":
            now = self._now()
            seconds, self._began_s = now - self._began_s, now
        else:
            # Kernels run behind the host's back: what they take is known when they are done.
            torch.accelerator.current_stream(self._device).synchronize()
            seconds = self._now() - self._began_s
            torch.accelerator.synchronize(self._device)
            self._began_s = self._now()
        return max(0.0, seconds)

    def _now(self) -> float:
        return time.perf_counter() - self._waited_s() - self._own.total_s
