"""The moves of a step: weights that stay in memory make each at once, those that leave it when they are used next.

Note: why a weight may wait
    A weight goes to ``+1``, to ``-1``, back, and along the update: the log says which moves these were in each step. When a
    forward brings a weight from its tier, it makes those that it has not made, and is written with them when it leaves: no
    weight comes for a move alone. The operations of each weight and their order are those of weights in memory, and so are
    the bits. Until it has made its moves, it is guarded: code that reads it elsewhere than in its unit lets it move first.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from hf_offload.errors import OffloadError
from hf_offload.methods.mezo.directions import Direction, make_moves, memory_for
from hf_offload.methods.mezo.log import STAGES, MezoLog
from hf_offload.state import guard
from hf_offload.state.contexts import outside
from hf_offload.state.registry import is_held, parked_of
from hf_offload.state.units import Units, pinned, unit_with
from hf_offload.state.weights import ParkedWeight


class Trajectory:
    """All moves of ``weights``, by name: :data:`STAGES` for each row of ``log``.

    Attributes:
        end: How many moves weights have made when they are used.
        is_lazy: Some weights leave memory: all of them wait until they are used.
        is_read: Others look at the memory of some of them without asking.
        lent: Weights that are one move further for now, with what they were.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], log: MezoLog):
        self.log = log
        self.end = 0
        self.is_lazy = self.is_read = False
        self.lent: list[tuple[_Weight, Tensor]] | None = None
        self.lock = threading.RLock()
        with torch._C.DisableTorchFunctionSubclass():
            self._metas = [torch.empty_like(one, device="meta") for one in weights.values()]
        self._device = next(iter(weights.values())).device
        self._directions: dict[int, Direction] = {}
        self._weights = [_Weight(self, number, *named) for number, named in enumerate(weights.items())]

    def units(self) -> Units | None:
        """The units of a model whose weights leave memory."""
        found = (unit_with(one.parameter) for one in self._weights if parked_of(one.parameter) is not None)
        return next((units for units, _ in filter(None, found)), None)

    def direction(self, step: int) -> Direction:
        """That of a step of the log."""
        if step not in self._directions:
            self._directions[step] = Direction(self.log.rows[step].seed, self._metas, self._device)
        return self._directions[step]

    def check(self) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` after an error that came while a weight changed."""
        for one in self._weights:
            one.check()

    def begin_step(self) -> None:
        """A row is about to be added to the log. Weights that the last step has not used catch up now."""
        self.is_lazy, self.is_read = self.units() is not None, False
        last = len(self.log.rows) - 1
        self.end = STAGES * (last + 1)
        for one in self._weights:
            if one.now < (STAGES * last if self.is_lazy else self.end):
                one.settle(unseen=False)
        self._directions = {step: known for step, known in self._directions.items() if step >= last}

    def advance(self, end: int) -> None:
        """Let weights have made so many moves when they are used next."""
        self.end = end
        torch.clear_autocast_cache()  # or an autocast around the step would go on with weights as they were
        at_once = [one for one in self._weights if one.expect() or not self.is_lazy]
        self.is_read |= self.is_lazy and bool(at_once)
        for one in at_once:
            if one.now >= 0:  # or an error is on its way already
                one.settle(unseen=False)

    def restart(self) -> None:
        """Another log has been loaded: go on from where it ends."""
        self.end = STAGES * len(self.log.rows)
        self._directions.clear()
        for one in self._weights:
            one.now = self.end

    def settle(self) -> None:
        """Let all weights make their moves."""
        for one in self._weights:
            one.settle(unseen=False)

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """A block in which weights are one move further. Then those that it has used are as they were."""
        self.end, self.lent = self.end + 1, []
        for one in self._weights:
            guard.put(one.parameter, one)
        try:
            yield
        finally:
            self.end, lent, self.lent = self.end - 1, self.lent, None
            for one, _ in lent:  # until it is back
                one.now = -1
            for one, before in lent:
                one.put_back(before)


class _Weight(guard.Debt):
    """How far one weight is: what its unit and its guard ask.

    Attributes:
        number: In the order in which directions are drawn.
        now: How many moves it has made; -1 after an error in the middle of one.
    """

    def __init__(self, trajectory: Trajectory, number: int, name: str, parameter: nn.Parameter):
        self.parameter = parameter
        self.number, self.name = number, name
        self.now = 0
        self._trajectory = trajectory

    def check(self) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` after an error that came while it changed."""
        if self.now < 0:
            raise OffloadError(
                f"An earlier error came while MeZO changed the weight {self.name}: load a checkpoint into the model, and "
                "make a new optimizer."
            )

    def expect(self) -> bool:
        """Moves are to be made. Returns whether others read the weight without asking: they are made at once."""
        parameter = self.parameter
        found, parked, key = unit_with(parameter), parked_of(parameter), ("mezo", id(parameter))
        if found is not None:
            former = found[1].owed_updates.get(key)
            if isinstance(former, _Weight) and former is not self:  # of another optimizer
                former.settle(unseen=False)
            found[1].owed_updates[key] = self
        # Backward of older graphs is an error.
        if isinstance(parked, ParkedWeight):
            parked.count_change(parameter)
        else:
            torch.autograd.graph.increment_version(parameter)
        guard.put(parameter, self)
        with torch._C.DisableTorchFunctionSubclass():
            has_aliases = is_held(parameter) or (parked is not None and len(parked.tensors) > 1)
        return has_aliases or found is None or found[1].pin_count > 0

    def settle(self, unseen: bool) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""
        with self._in_memory():
            self.finish()

    def check_stepped(self) -> None:
        pass

    def overwritten(self) -> None:
        pass

    def read_ahead(self) -> bool:
        return True

    def finish(self) -> None:
        """See :class:`~hf_offload.state.units.OwedUpdate`."""
        trajectory = self._trajectory
        with trajectory.lock, outside():
            if self.now != trajectory.end:
                self.check()
                with self._changing() as value:
                    if trajectory.lent is not None:
                        self._move(value, trajectory.end - 1)
                        trajectory.lent.append((self, value.clone()))
                    self._move(value, trajectory.end)
        guard.lift(self.parameter, self)

    def put_back(self, before: Tensor) -> None:
        """Be as ``before``, a move earlier."""
        with self._in_memory(finishes=False), self._trajectory.lock, outside():
            self._trajectory.is_read |= is_held(self.parameter)
            with self._changing() as value:
                value.copy_(before)
        self.now = self._trajectory.end

    def _in_memory(self, finishes: bool = True) -> contextlib.AbstractContextManager[None]:
        """What stays in memory moves there: the others of its unit need not come."""
        if parked_of(self.parameter) is None:
            return contextlib.nullcontext()
        return pinned([self.parameter], finishes=finishes)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Tensor]:
        """A block that changes the value. Versions have counted that already."""
        parked = parked_of(self.parameter)
        if parked is not None:
            parked.come()
            parked.wait_until_written()
            if not parked.is_here:  # others have its address: it changes where it is
                parked.reads.drop()
            parked.note_change()
        value = self.parameter.detach()
        with torch.autograd._unsafe_preserve_version_counter(value):
            yield value

    def _move(self, value: Tensor, end: int) -> None:
        """Make the moves that are left to ``end``, those of a step with one drawing of its direction."""
        setup, rows = self._trajectory.log.setup, self._trajectory.log.rows
        while self.now < end:
            step, first = divmod(self.now, STAGES)
            last = min(STAGES, end - STAGES * step)
            moves = setup.moves(rows[step], setup.weights[self.number].group, first, last)
            if moves:
                direction = self._trajectory.direction(step)
                generator, memory = direction.generator(self.number), memory_for(value, value.device)
                self.now = -1  # before, an error has not changed it
                make_moves(value, memory, generator, moves)
                direction.passed(self.number, generator)
            self.now = STAGES * step + last
