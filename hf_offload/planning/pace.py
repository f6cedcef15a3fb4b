"""How long the steps of a training take, next to what was predicted of them."""

import collections
import statistics
import time
from collections.abc import Callable

from hf_offload.planning.shape_plan import ShapePlan

# Steps whose median is this far from the prediction correct it. The prediction follows the latest of them; another plan is
# looked for after some, and each time after twice as many: a machine that has other work, too, is now fast and now slow.
_OFF = 1.1
_TIMED_STEPS = 3
_LATEST_STEPS = 5


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
    """What steps under the present plans took, as ratios to what was predicted."""

    def __init__(self) -> None:
        # Of all steps since then: to what was predicted when another plan was looked for last.
        self._timed: list[float] = []
        # Time, and that of compute, to what is predicted now.
        self._latest: collections.deque[tuple[float, float]] = collections.deque(maxlen=_LATEST_STEPS)
        self._patience = _TIMED_STEPS

    def add(self, main: ShapePlan, seconds: float, pace: float) -> float | None:
        """A step with the prediction of ``main`` took ``seconds``, and its compute ``pace`` times as long as predicted.

        Returns what steps take as a ratio to what was predicted, if it is time to look for another plan.
        """
        main.prediction.measured_step_s.append(seconds)
        ratio = seconds / main.prediction.step_s
        self._latest.append((ratio, pace))
        self._timed.append(ratio * main.followed)
        if len(self._timed) < self._patience:
            return None
        ratio = statistics.median(self._timed)
        self._timed.clear()
        if _agree(ratio):
            return None
        self._patience *= 2
        return ratio

    @property
    def has_changed(self) -> bool:
        """Whether the latest steps, of which a few may have been slow by chance, take what no prediction says, and compute
        is why.
        """
        return not (_agree(statistics.median(ratio for ratio, _ in self._latest)) or _agree(self._of_latest))

    def take(self) -> float:
        """The pace of the latest steps' compute, from which predictions are made anew."""
        pace = self._of_latest
        self._latest.clear()
        return pace

    @property
    def _of_latest(self) -> float:
        """The median; as predicted where there are too few of them."""
        if len(self._latest) < _TIMED_STEPS:
            return 1.0
        return statistics.median(pace for _, pace in self._latest)

    def forget(self) -> None:
        """There is another plan."""
        self._timed.clear()
        self._latest.clear()


def _agree(ratio: float) -> bool:
    return 1 / _OFF <= ratio <= _OFF
