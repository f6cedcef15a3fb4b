"""Which weights of a model are in memory: those that are used, and as many as fit of those that are used next."""

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_offload.interrupts import signals_deferred
from hf_offload.parameters.contexts import is_outside, outside
from hf_offload.parameters.demand import housed
from hf_offload.parameters.views import follow_attributes
from hf_offload.plan.windows import weights_window
from hf_offload.residency.order import UseOrder
from hf_offload.residency.weight import Weight
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.kept import KeptRange
from hf_offload.storage.mapped import MappedFiles
from hf_offload.storage.service import WEIGHTS
from hf_offload.storage.stored import Store

logger = logging.getLogger(__name__)

_AHEAD = 16
"""Of how many weights at most the next use is looked at to read it ahead."""


class Residency:
    """The weights of one model. A parameter holds its weight, and that the residency, which keeps neither alive.

    Args:
        store: Where they go.
        limit_bytes: What may be in memory of them, unless what is used at once takes more.
        files: Where copies go that a state dict holds; None for copies in memory.
        largest_bytes: Of the largest of them, as far as that is known.

    Attributes:
        most_bytes: Most bytes of them that were in memory at any time of the present run.
        parked_bytes: Bytes of all of them, also once the model has gone.
        is_home: The model was made with its weights on the tier: settings that leave them in memory do not bring them there.
    """

    def __init__(self, store: Store, limit_bytes: int, files: MappedFiles | None = None, largest_bytes: int = 0):
        self.store = store
        self._limit_bytes = limit_bytes
        self._largest_bytes = largest_bytes
        self._is_short = False  # of room, when the last weight came
        self.most_bytes = self.parked_bytes = 0
        self.is_home = False
        self._files = files
        self._lock = threading.RLock()
        self._weights: list[weakref.ref[Weight]] = []
        self._order = UseOrder(0)
        self._moved_before = (0, 0)

    def begin_run(self, limit_bytes: int) -> None:
        """Another run begins."""
        self.limit_bytes = limit_bytes
        self._is_short = False  # of room, when the last weight came
        self.most_bytes = self.bytes_in_memory
        self._moved_before = self._moved_in_all

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes written to the tier and read from it in the present run."""
        (written, read), (written_before, read_before) = self._moved_in_all, self._moved_before
        return written - written_before, read - read_before

    @property
    def _moved_in_all(self) -> tuple[int, int]:
        stats = self.store.tier.stats
        return stats.written_bytes, stats.read_bytes

    def park(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Let these parameters leave memory from now on, but for as many as fit."""
        with self._lock, outside():
            for name, parameter in parameters:
                self.receive(name, parameter)
            self._make_room(0)
            self.parked_bytes = self.total_bytes
            self._order = UseOrder(len(self._weights))

    def receive(self, name: str, parameter: nn.Parameter) -> None:
        """Let one parameter leave memory later: it stays until another needs room, for its values may be about to come."""
        with self._lock, outside():
            self._make_room(parameter.nbytes)
            weight = Weight(parameter, name, len(self._weights), self)
            self._weights.append(weakref.ref(weight))
            self._largest_bytes = max(self._largest_bytes, weight.nbytes)
            follow_attributes(parameter, vars(parameter))
            housed(parameter, weight)

    @property
    def count(self) -> int:
        """How many weights there were."""
        return len(self._weights)

    def weights(self) -> list[Weight]:
        """Those whose parameters are alive."""
        return [weight for reference in self._weights if (weight := reference()) is not None]

    @property
    def limit_bytes(self) -> int:
        """What may be in memory of them, unless what is used at once takes more."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int) -> None:
        self._limit_bytes, self._is_short = limit_bytes, True
        self.store.window_bytes = weights_window(limit_bytes, self._largest_bytes)

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of the weights that are in memory."""
        return sum(weight.nbytes for weight in self.weights() if weight.is_in_memory)

    @property
    def budget_bytes(self) -> int:
        """Most bytes of memory that they take, with those on their way to the tier and back."""
        total = self.total_bytes
        return total if self.limit_bytes >= total else self.limit_bytes + self.store.window_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(weight.nbytes for weight in self.weights())

    # -- uses -----------------------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def enter(self, weight: Weight) -> None:
        """Let ``weight`` be in memory until it is left as often."""
        with signals_deferred, self._handled(), self._lock:
            weight.check_copies()
            if weight.uses == 0:
                self._order.used(weight.number)
            if not weight.is_in_memory:
                with outside():
                    self._make_room(weight.nbytes)
                    weight.bring()
                    self.most_bytes = max(self.most_bytes, self.bytes_in_memory)
            elif self._is_short:  # others may leave that could not before
                with outside():
                    self._make_room(0, weight)
            weight.prepare()
            if weight.uses == 0:
                with contextlib.nullcontext() if is_outside() else outside():
                    self._read_ahead()
            weight.uses += 1  # last: what raises before has not entered

    def leave(self, weight: Weight, changed: bool) -> None:
        """``weight`` was used."""
        with signals_deferred, self._handled(), self._lock:
            with torch._C.DisableTorchFunctionSubclass():
                weight.note_changes(changed)
            weight.uses -= 1

    def _handled(self) -> contextlib.AbstractContextManager[None]:
        return self.store.storage.handling.of(WEIGHTS)

    def saved(self, weight: Weight) -> Tensor | None:
        """What a state dict holds of ``weight``: a copy on the drive, where not all weights may be in memory."""
        if self._files is None or self.total_bytes <= self.limit_bytes:
            return None
        with self._lock, outside():
            return weight.copy(self._files)

    def keep(self, weight: Weight) -> KeptRange | None:
        """Hold the value of ``weight`` on its drive: :meth:`Weight.keep`."""
        if not self.store.tier.may_keep:
            return None
        with self._lock, outside():
            if weight.derivation is None:
                return weight.hold()
            self.enter(weight)  # to what it is used with
            try:
                return weight.hold()
            finally:
                self.leave(weight, False)

    @property
    def may_end(self) -> bool:
        """Whether the model may have its weights without it: it was not made with them on the tier, and no state dict is held
        whose tensors are copies of them.
        """
        return not self.is_home and not any(weight.has_copies for weight in self.weights())

    def bring_all(self) -> None:
        """Let all weights be in memory, for good, as if they had never left."""
        with self._lock, outside():
            for weight in self.weights():
                self._release(weight)

    def let_go(self, weight: Weight) -> None:
        """Let ``weight`` be in memory for good, and refer to its parameter no more."""
        with self._lock, outside():
            self._release(weight)
            weight.forget()

    def _release(self, weight: Weight) -> None:
        weight.bring()
        weight.prepare()
        weight.release()

    def _make_room(self, nbytes: int, used: Weight | None = None) -> None:
        """Let weights leave that are used last, except the one that is ``used`` now, until so many bytes may come."""
        excess = self.bytes_in_memory + nbytes - self.limit_bytes
        self._is_short = excess > 0
        if not self._is_short:
            return
        for weight in self._farthest_first():
            if weight is not used and weight.may_leave():
                excess -= weight.nbytes
                weight.send(self.store)
                self.store.throttle()
                if excess <= 0:
                    self._is_short = False
                    return

    def _farthest_first(self) -> list[Weight]:
        next_use: dict[int, int] = {}
        for place, number in enumerate(self._order.coming()):
            next_use.setdefault(number, place)
        present = [weight for weight in self.weights() if weight.is_in_memory]
        never = len(next_use) * 1000 + 1000
        return sorted(present, key=lambda weight: next_use.get(weight.number, never), reverse=True)

    def _read_ahead(self) -> None:
        looked_at: set[int] = set()
        for number in self._order.coming():
            if number in looked_at:
                continue
            looked_at.add(number)
            weight = self._weights[number]()
            if len(looked_at) > _AHEAD or (weight is not None and not weight.read_ahead()):
                return

    def try_reading(self) -> None:
        """Read the largest weight that is on the tier only, so that there is a rate to :meth:`tell`."""
        away = [weight for weight in self.weights() if not weight.is_in_memory]
        if away and not self.store.tier.stats.read_busy_s:
            largest = max(away, key=lambda weight: weight.nbytes)
            largest.enter()
            largest.leave()

    @property
    def bytes_of_a_pass(self) -> int:
        """Bytes that a use of all weights one after the other reads, such as a generated token, once the order is known."""
        return max(0, self.total_bytes - self.limit_bytes)

    def tell(self) -> None:
        """Say in the log what has left memory, and what a use of all of it takes."""
        logger.info(
            "%d weights with %s are on %s when they are not used; %s of them may be in memory.",
            len(self._weights),
            format_bytes(self.total_bytes),
            self.store.tier.name,
            format_bytes(min(self.limit_bytes, self.total_bytes)),
        )
        read = self.store.tier.stats
        if self.bytes_of_a_pass and read.read_busy_s:
            rate = read.timed_read_bytes / read.read_busy_s
            logger.info(
                "A pass over the model, such as each token that it generates, reads %s: %.2g s at %s a second.",
                format_bytes(self.bytes_of_a_pass),
                self.bytes_of_a_pass / rate,
                format_bytes(rate),
            )
