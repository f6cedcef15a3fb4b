"""The moves of a step: weights that stay in memory make each at once, those that leave it when they are used next.

Note: why a weight may wait
    A weight goes ``+1``, ``-2``, back and along the update, by moves that are known for all weights. When a forward brings it
    from its tier, it makes those that it has not made, and is written with them when it leaves: no weight comes for a move
    alone. The operations of each weight and their order are those of weights in memory, and so are the bits. Until it has
    made its moves, it is guarded: code that reads it elsewhere than in its unit lets it move first.
"""

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from hf_offload.errors import OffloadError
from hf_offload.methods.mezo.directions import Direction, Shift, Update, make_moves, memory_for
from hf_offload.state import guard
from hf_offload.state.contexts import outside
from hf_offload.state.parked import Parked
from hf_offload.state.parked_weight import ParkedWeight
from hf_offload.state.registry import is_held, parked_of
from hf_offload.state.units import Units, pinned, unit_with

_OWED = "mezo"


class Copy(enum.Enum):
    """What a weight does that is to be as it was (``restore="pristine"``)."""

    KEEP = "a copy is kept"
    RETURN = "it is as its copy again"


Step = Shift | Copy | Callable[[int], Update]
"""A move of all weights; the update depends on a weight's number."""


class Trajectory:
    """All moves of ``weights``, by name, of which each weight makes those that it has not made.

    Attributes:
        end: How many moves weights have made when they are used.
        is_lazy: Some weights leave memory: all of them wait until they are used.
        is_read: Others look at the memory of some of them without asking.
        has_changed: A forward has changed some of them.
        is_lent: One pass uses weights one move beyond where the other one is to find them again.
        lent: Weights that have made this move.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]):
        self.end = 0
        self.is_lazy = self.is_read = self.has_changed = self.is_lent = False
        self.lent: list[_Weight] = []
        self.lock = threading.RLock()
        self._first = 0  # number of the first move that is still known
        self._moves: list[tuple[Direction, Step]] = []
        self._begun = 0  # the number of moves that came before the present step
        with torch._C.DisableTorchFunctionSubclass():
            self._metas = [torch.empty_like(one, device="meta") for one in weights.values()]
        self._device = next(iter(weights.values())).device
        self._weights = [_Weight(self, number, *named) for number, named in enumerate(weights.items())]

    def units(self) -> Units | None:
        """The units of a model whose weights leave memory."""
        parameters = (one.parameter() for one in self._weights)
        found = (unit_with(one) for one in parameters if one is not None and parked_of(one) is not None)
        return next((units for units, _ in filter(None, found)), None)

    # -- a step ---------------------------------------------------------------------------------------------------------

    def begin_step(self, seed: int, moves: Iterable[Step]) -> None:
        """These moves are to come, along the direction of ``seed``. Weights that the last step has not used catch up now."""
        self.check()
        with self._changing():
            for one in self._weights:
                if one.now < (self._begun if self.is_lazy else self.end):
                    one.settle(unseen=False)
        direction = Direction(seed, self._metas, self._device)
        with self.lock:
            first = min(one.now for one in self._weights)
            del self._moves[: first - self._first]
            self._first, self._begun = first, self.end
            self._moves += [(direction, move) for move in moves]
        self.is_lazy, self.is_read = self.units() is not None, False

    def update(self, update_of: Callable[[int], Update]) -> None:
        """Let the weight of each number make its update, along the direction of the step."""
        self._moves.append((self._moves[-1][0], update_of))
        self.advance()

    def advance(self, count: int | None = None) -> None:
        """Let all weights make so many moves more, or all that are left."""
        self.end = self._first + len(self._moves) if count is None else self.end + count
        torch.clear_autocast_cache()
        with self._changing():
            for one in [each for each in self._weights if each.expect()] if self.is_lazy else self._weights:
                if one.now >= 0:  # or an error is on its way already
                    one.settle(unseen=False)
        torch.clear_autocast_cache()  # or an autocast around the step would go on with weights as they were

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """After an error, weights that have not moved do so before they are read."""
        try:
            yield
        except BaseException:
            for one in self._weights:
                one.guard()
            raise

    def check(self) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` after an error that came while a weight changed."""
        for one in self._weights:
            one.check()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A loss is computed. Autocast keeps no copies of weights that leave memory: each operation casts them anew."""
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(caches and not self.is_lazy)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(caches)
        self.has_changed |= any(one.is_changed for one in self._weights)

    # -- two passes at once ---------------------------------------------------------------------------------------------

    def lend(self) -> None:
        """Let weights be one move further until :meth:`take_back`."""
        self.end, self.is_lent = self.end + 1, True
        for one in self._weights:
            one.guard()

    def take_back(self) -> bool:
        """Let weights be as they were before :meth:`lend`. Whether the pass has neither changed them nor kept views."""
        self.end, self.is_lent = self.end - 1, False
        lent, self.lent = self.lent, []
        for one in lent:  # until it is back
            one.now = -1
        are_untouched = [one.take_back() for one in lent]
        return all(are_untouched)

    # -- one weight -----------------------------------------------------------------------------------------------------

    def bring(self, weight: "_Weight", value: Tensor, end: int) -> None:
        """Let ``value`` make the moves that are left to ``end``."""
        while weight.now < end:
            due = self._moves[weight.now - self._first : end - self._first]
            (direction, first), moves = due[0], [move for _, move in due]
            if weight.has_copy and Copy.RETURN in moves:  # what comes before it is undone
                weight.copy(value, Copy.RETURN)
                weight.now += moves.index(Copy.RETURN) + 1
            elif isinstance(first, Copy):
                weight.copy(value, first)
                weight.now += 1
            else:
                self._move_along(weight, value, direction, due)

    def _move_along(
        self, weight: "_Weight", value: Tensor, direction: Direction, due: list[tuple[Direction, Step]]
    ) -> None:
        """Make the first moves that are ``due``, those along one direction."""
        moves: list[Shift | Update] = []
        for other, move in due:
            if other is not direction or isinstance(move, Copy):
                break
            moves.append(move if isinstance(move, Shift) else move(weight.number))
        generator = direction.generator(weight.number)
        memory = memory_for(value, value.device)  # after an error here, it has not changed
        after, weight.now = weight.now + len(moves), -1
        make_moves(value, memory, generator, moves)
        weight.now = after
        direction.passed(weight.number, generator)


class _Weight(guard.Debt):
    """How far one weight is: what its unit and its guard ask.

    Attributes:
        number: In the order in which directions are drawn.
        now: How many moves it has made; -1 after an error in the middle of one.
    """

    def __init__(self, trajectory: Trajectory, number: int, name: str, parameter: nn.Parameter):
        self.parameter: Callable[[], nn.Parameter | None] = weakref.ref(parameter)  # its unit holds this
        self.number, self.name = number, name
        self.now = 0
        self._trajectory = trajectory
        self._copy: Tensor | None = None
        self._before: Tensor | None = None  # what it was before it was lent
        self._state = _state_of(parameter)  # in which MeZO has left it

    @property
    def has_copy(self) -> bool:
        """Whether it is to be as a copy again."""
        return self._copy is not None

    @property
    def is_changed(self) -> bool:
        """Whether something else has changed it since it moved."""
        parameter = self.parameter()
        return parameter is not None and _state_of(parameter) != self._state

    def check(self) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` after an error that came while it changed."""
        if self.now < 0:
            raise OffloadError(
                f"An earlier error came while MeZO changed the weight {self.name}: load a checkpoint into the model, and "
                "make a new optimizer."
            )

    def guard(self) -> None:
        """Let code that reads the weight make its moves first, if there are any."""
        parameter = self.parameter()
        if parameter is not None and self.now != self._trajectory.end:
            for tensor in _tensors_of(parameter):
                guard.put(tensor, self)

    def expect(self) -> bool:
        """Moves are to be made. Returns whether others read the weight without asking: they are made at once."""
        parameter = self.parameter()
        if parameter is None:
            return False
        found, parked = unit_with(parameter), parked_of(parameter)
        if found is not None:
            former = found[1].owed.get((_OWED, id(parameter)))
            if isinstance(former, _Weight) and former is not self:  # of an optimizer that has gone
                former.settle(unseen=False)
            found[1].owed[_OWED, id(parameter)] = self
        # Backward of older graphs is an error.
        if isinstance(parked, ParkedWeight):
            parked.count_change(parameter)
        else:
            torch.autograd.graph.increment_version(parameter)
        self._state = _state_of(parameter)
        self.guard()
        with torch._C.DisableTorchFunctionSubclass():
            is_used = found is None or found[1].uses > 0 or len(_tensors_of(parameter)) > 1
            is_read = is_used or is_held(parameter)
        self._trajectory.is_read |= is_read
        return is_read

    def settle(self, unseen: bool) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""
        parameter = self.parameter()
        if parameter is not None:
            with _in_memory(parameter):
                self.finish()

    def check_stepped(self) -> None:
        pass

    def overwritten(self) -> None:
        pass

    def read_ahead(self) -> bool:
        return True

    def finish(self) -> None:
        """See :class:`~hf_offload.state.units.Owed`."""
        parameter = self.parameter()
        if parameter is None:
            return
        with self._trajectory.lock, outside():
            if self.now != self._trajectory.end:
                self.check()
                self._move(parameter, parked_of(parameter))
        if guard.is_guarded(parameter):
            for tensor in _tensors_of(parameter):
                guard.lift(tensor, self)

    def _move(self, parameter: nn.Parameter, parked: Parked | None) -> None:
        if parked is not None:
            parked.come()
            if not parked.is_here:  # others have its address: it changes where it is
                parked.drop_reads()
        trajectory, value = self._trajectory, parameter.detach()
        end = trajectory.end - trajectory.is_lent
        if self.now != end:
            trajectory.bring(self, value, end)
            if parked is not None:
                parked.note_change()
        if trajectory.is_lent:
            if parked is not None:
                parked.wait_until_written()
            self._before = value.clone()
            trajectory.lent.append(self)
            trajectory.bring(self, value, trajectory.end)
        self._state = _state_of(parameter)

    def take_back(self) -> bool:
        """See :meth:`Trajectory.take_back`."""
        parameter, before = self.parameter(), self._before
        if parameter is None or before is None:
            return True
        with _in_memory(parameter, finishes=False), self._trajectory.lock, outside():
            is_untouched = not self.is_changed and not is_held(parameter)
            parameter.detach().copy_(before)
            self._state, self._before = _state_of(parameter), None
            self.now = self._trajectory.end
        return is_untouched

    def copy(self, value: Tensor, how: Copy) -> None:
        """Keep a copy of ``value``, on the tier where the weight is, or let it be as that copy."""
        parameter = self.parameter()
        if how is Copy.KEEP:
            self._copy = value.clone()
            parked = None if parameter is None else parked_of(parameter)
            if parked is not None:
                Parked(self._copy, f"a copy of {self.name}", parked.store).leave()
                parked.store.throttle()
        else:
            assert self._copy is not None
            parked = parked_of(self._copy)
            if parked is not None:
                parked.come()
            value.copy_(self._copy)
            self._copy = None


def _in_memory(parameter: nn.Parameter, finishes: bool = True) -> contextlib.AbstractContextManager[None]:
    """What stays in memory moves there: the others of its unit need not come."""
    return contextlib.nullcontext() if parked_of(parameter) is None else pinned([parameter], finishes=finishes)


def _tensors_of(parameter: nn.Parameter) -> list[Tensor]:
    parked = parked_of(parameter)
    return [parameter] if parked is None else parked.tensors


def _state_of(parameter: nn.Parameter) -> tuple[int, int]:
    """What changes when it is changed: its version, and its storage."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version, parameter.untyped_storage()._cdata
