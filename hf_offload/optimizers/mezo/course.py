"""Weights that move when they are used: of those whose memory comes and goes, none comes for a move alone.

Note: what is written
    A weight goes ``+1``, ``-2``, back and along the update, by moves that are known for all weights before it is used. When
    its memory comes, it makes those that it has not made; it goes without being written where the same moves lead
    there from what was written before. So a step reads a weight once for each forward pass, and writes it once.
    The operations of each weight and their order are those of weights in memory, and so are the bits. Until a weight has
    made its moves, it is guarded: a read elsewhere than in its unit lets it move first.
    A weight that is to be as it was (``restore="pristine"``) is written before it moves, and read again instead of going
    back: as often as one that goes back.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hf_offload.errors import OffloadError
from hf_offload.optimizers.mezo.apart import Unchanging
from hf_offload.optimizers.mezo.directions import Directions, Move, Shift, Update
from hf_offload.optimizers.mezo.pairs import UnfitError
from hf_offload.state import guard
from hf_offload.state.contexts import outside
from hf_offload.state.derived import ParkedWeight
from hf_offload.state.parked import Where
from hf_offload.state.registry import is_held, parked_of
from hf_offload.state.units import pinned, unit_with

Place = tuple[int, int]
"""The number of a stage of the way, and how many of its moves were made."""


class Course:
    """All moves of ``weights``, by name, of which each weight makes those that it has not made when it is used.

    Attributes:
        is_changing: Never: an error in the middle of a change is that of one weight, which says so when it is used.
        end: Where weights are to be when they are used.
        kept_at: Where a weight is kept before it goes on, as it may have to go on from there again. None: weights are kept
            when they leave memory.
        lock: Held while weights move: a model may compute in several threads.
        is_seen: Others can look at the memory of some of them without asking.
        turning: The threads of two passes that take turns, if any do: one that can see how a weight changes for the other
            one ends with :class:`~hf_offload.optimizers.mezo.pairs.UnfitError`, and so does a thread of neither.
        was_seen: That has happened.
        is_computing: Losses are computed: nothing else may change weights.
    """

    is_changing = False

    def __init__(self, weights: dict[str, nn.Parameter]):
        parameters = list(weights.values())
        self._names = list(weights)
        self._references = [weakref.ref(one) for one in parameters]  # their units hold this
        self._directions = Directions(parameters)
        self._stages: dict[int, _Stage] = {}
        self._begun = 0  # the stage that the present step began with
        units = next((found[0] for one in parameters if (found := unit_with(one)) is not None), None)
        self.lock = threading.RLock() if units is None else units.lock
        self.end: Place = (0, 0)
        self.kept_at: Place | None = None
        self.is_seen = self.was_seen = self.is_computing = False
        self.turning: set[int] = set()
        self._moving = [MovingWeight(self, *one) for one in enumerate(weights.items())]
        self._settled: list[MovingWeight] = []  # since passes last took turns

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of the weights that are still there."""
        return [one for reference in self._references if (one := reference()) is not None]

    def begin_step(self) -> None:
        """The moves to come are those of another step. Weights that no pass of the last step has used make its moves now."""
        last = self._begun
        self._settle(one for one in self._moving if one.now[0] < last)
        with self.lock:
            self._stages = {number: stage for number, stage in self._stages.items() if number >= last}
            self._begun = self.end[0] + 1
            self.end = (self._begun, 0)
        self.is_computing = True

    def keep_here(self) -> None:
        """Each weight is kept where it is to be now, and can go on from there again, until :meth:`go_on` or :meth:`undo`."""
        self.kept_at = self.end

    def turn(self, count: int, inform: bool = True) -> None:
        """Let weights be where they have made so many moves of this step when they are used."""
        self.end = (self.end[0], count)
        if inform:
            self._inform()
        while self._settled:
            self._settled.pop().guard()

    def go_on(self) -> None:
        """All moves of this step are to be made. No weight goes on from where it was kept again."""
        self.kept_at, self.is_computing = None, False
        if self.end[0] in self._stages:
            self.turn(len(self._stages[self.end[0]].moves), inform=False)
        self._forget_copies()

    def undo(self) -> None:
        """Weights have not made the moves since :meth:`keep_here`, which is where the step has begun."""
        self.is_computing = False
        with self.lock:
            number = self.end[0]
            undone = self._stages.pop(number, None)
            if undone is not None:
                self._stages[number + 1] = _Stage(undone.seed, undone.states)
            self.end, self.kept_at = (number + 1, 0), None
        self._inform()
        self._forget_copies()
        torch.clear_autocast_cache()

    def end_step(self) -> None:
        """All losses of the step are there."""
        self.is_computing = False

    def check(self) -> None:
        """Each weight says itself when it is used that an earlier error came while it changed."""

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A loss is computed. Raises :class:`~hf_offload.errors.OffloadError` if the model changes a weight meanwhile."""
        if self.turning:
            yield
        else:
            named = zip(self._names, self._references, strict=True)
            weights = {name: one for name, reference in named if (one := reference()) is not None}
            with Unchanging(weights) as mode:
                yield
            if mode.error is not None:
                raise mode.error
        for moving in self._moving:
            moving.check_unchanged()

    @contextlib.contextmanager
    def casting(self) -> Iterator[None]:
        """Let autocast keep no copies of weights that leave memory: each operation casts them anew, to the same bits."""
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(before)

    def _forget_copies(self) -> None:
        copied = [one for one in self._moving if one.copy_of is not None]
        self._settle(copied)
        for one in copied:
            one.copy_of = None

    def give_up(self) -> None:
        """Passes may not take turns with this model."""
        self.was_seen = True
        if threading.get_ident() not in self.turning:
            raise SystemExit  # ends a thread of the model's own without a word
        raise UnfitError

    def is_lost(self, place: Place) -> bool:
        """Whether no moves lead from ``place`` to the end."""
        number, made = place
        stage = self._stages.get(number)
        return place > self.end or made > (0 if stage is None else len(stage.moves))

    def move(self, shift: Shift) -> None:
        """Let all weights make this move."""
        self._add(shift.seed, lambda number: shift)

    def update(self, updates: Sequence[Update]) -> None:
        """Let each weight make its update."""
        self._add(updates[0].seed, lambda number: updates[number])

    def _add(self, seed: int, move_of: Callable[[int], Move]) -> None:
        with self.lock:
            number, count = self.end
            if number not in self._stages:
                self._stages[number] = _Stage(seed, {0: self._directions.generator(seed).get_state()})
            self._stages[number].moves.append(move_of)
            self.end = (number, count + 1)
        self._inform()
        torch.clear_autocast_cache()

    def _inform(self) -> None:
        """Guard all weights, and move at once what is read without asking."""
        seen = [moving for moving in self._moving if moving.expect()]
        self.is_seen = bool(seen)
        self._settle(seen)

    def _settle(self, which: "Iterable[MovingWeight]") -> None:
        for moving in which:
            moving.settle(unseen=False)

    def note_settled(self, moving: "MovingWeight") -> None:
        """``moving`` is guarded no more."""
        if self.turning:
            self._settled.append(moving)

    def bring(self, moving: "MovingWeight", value: Tensor, target: Place) -> None:
        """Let ``value``, which is where ``moving`` says, make the moves that are left to ``target``."""
        with self.lock, outside():
            ways = []
            for number in range(moving.now[0], target[0] + 1):
                stage = self._stages.get(number)
                if stage is None:
                    continue
                made = moving.now[1] if number == moving.now[0] else 0
                left = stage.moves[made : target[1] if number == target[0] else None]
                if left:
                    moves = [move_of(moving.number) for move_of in left]
                    ways.append((stage, self._generator(stage, moving.number), moves))
            moving.now = (-1, 0)
            self._directions.make([(generator, moves) for _, generator, moves in ways], value)
            moving.now = target
            for stage, generator, _ in ways:
                stage.states.setdefault(moving.number + 1, generator.get_state())

    def _generator(self, stage: "_Stage", number: int) -> torch.Generator:
        """At the beginning of the direction of the weight of this number."""
        place = max(known for known in stage.states if known <= number)
        generator = self._directions.generator(stage.seed)
        generator.set_state(stage.states[place])
        for passed in range(place, number):
            self._directions.skip(passed, generator)
            stage.states[passed + 1] = generator.get_state()
        return generator


class _Stage:
    """Moves along one direction: those of a step, or its update alone if the others were undone.

    Attributes:
        seed: Of the direction.
        states: Those of the generator at the beginning of each weight's direction, as far as they are known, by number.
        moves: Each gives the move of the weight of a number.
    """

    def __init__(self, seed: int, states: dict[int, Tensor]):
        self.seed = seed
        self.states = states
        self.moves: list[Callable[[int], Move]] = []


class MovingWeight:
    """How far one weight is: what its unit and its guard ask, and a :class:`~hf_offload.state.derived.Derivation`.

    Attributes:
        number: In the order in which directions are drawn.
        now: Where the value is that is read: in memory, or in the slot of a weight that has left it.
        copy_of: A place, and the value there, of a weight that is kept in memory instead of on the tier.
    """

    def __init__(self, course: Course, number: int, named: tuple[str, nn.Parameter]):
        self._course = course
        self._name, parameter = named
        self._parameter = weakref.ref(parameter)
        self.number = number
        self.now = self._kept = course.end
        self.copy_of: tuple[Place, Tensor] | None = None
        self._version = 0  # that MeZO has left
        self._storage = 0  # whose it was

    @property
    def is_due(self) -> bool:
        """Whether moves are to be made."""
        turning = self._course.turning
        if turning and threading.get_ident() not in turning:
            self._course.give_up()
        return self.now != self._course.end

    @property
    def _is_lost(self) -> bool:
        """Whether the value to use is made from one that is kept."""
        return self._course.is_lost(self.now)

    @property
    def _is_kept_next(self) -> bool:
        place = self._course.kept_at
        is_between = place is not None and self.now <= place < self._course.end
        return is_between and self.copy_of is None and self._kept != place

    # -- Derivation -----------------------------------------------------------------------------------------------------

    @property
    def needs_slot(self) -> bool:
        return self.copy_of is None and (self._kept == self._course.kept_at or self._is_lost)

    @property
    def may_go(self) -> bool:
        # From what was kept in an earlier step, one more direction would have to be drawn.
        return self._kept[0] == self.now[0]

    def arrived(self) -> None:
        self.now = self._kept
        self.guard()

    def kept(self) -> None:
        self._kept = self.now

    def rescue(self, content: Tensor) -> None:
        parameter = self._parameter()
        if parameter is not None:
            flat = content.clone().view(parameter.dtype)
            self.copy_of = self._kept, flat.as_strided(parameter.size(), parameter.stride())

    # -- the unit, and the guard ----------------------------------------------------------------------------------------

    def guard(self) -> None:
        """Let the weight make its moves before it is read, if there are any."""
        parameter = self._parameter()
        if parameter is not None and self.now != self._course.end:
            parked = _parked_of(parameter)
            for tensor in [parameter] if parked is None else parked.tensors:
                guard.put(tensor, self)

    def expect(self) -> bool:
        """Moves are to be made. Returns whether others read the weight without asking: they are made at once."""
        parameter = self._parameter()
        if parameter is None:
            return False
        found = unit_with(parameter)
        key = (_OWED, id(parameter))
        if found is not None and found[1].owed.get(key) is not self:
            former = found[1].owed.get(key)
            if isinstance(former, MovingWeight):  # of an optimizer that has gone
                former.settle(unseen=False)
            found[1].owed[key] = self
        parked = _parked_of(parameter)
        is_alone = parked is not None and len(parked.tensors) == 1
        if parked is not None and is_alone and parked.derivation is not self:
            guard.settle([parameter])
            self._kept = (-1, -1)  # it is written before it leaves memory again
            parked.derivation = self
            if parked.where is not Where.HERE:
                self._kept = self.now
        # Backward of older graphs is an error.
        if parked is None:
            torch.autograd.graph.increment_version(parameter)
        else:
            parked.count_change(parameter)
        self._note(parameter)
        self.guard()
        with torch._C.DisableTorchFunctionSubclass():
            is_read = found is None or found[1].uses > 0 or (parked is not None and not is_alone)
            return is_read or is_held(parameter)

    def settle(self, unseen: bool) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""
        parameter = self._parameter()
        if parameter is None:
            return
        is_in_memory = _parked_of(parameter) is None  # and the others of its unit need not come
        with contextlib.nullcontext() if is_in_memory else pinned([parameter]):
            self.finish()

    def done(self) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""

    def check_stepped(self) -> None:
        pass

    def read_ahead(self) -> bool:
        return True

    def finish(self) -> None:
        parameter = self._parameter()
        if parameter is None:
            return
        if self.is_due:
            with self._course.lock, outside():
                if self.is_due:  # no other thread has moved it meanwhile
                    self._move(parameter, _parked_of(parameter))
        self._lift(parameter)

    def _lift(self, parameter: nn.Parameter) -> None:
        if guard.is_guarded(parameter):
            parked = _parked_of(parameter)
            for tensor in [parameter] if parked is None else parked.tensors:
                guard.lift(tensor, self)
            self._course.note_settled(self)

    def _move(self, parameter: nn.Parameter, parked: ParkedWeight | None) -> None:
        self._check()
        course = self._course
        if parked is not None:
            parked.come()
        if course.is_computing:
            self.check_unchanged()
        if course.turning and is_held(parameter):
            course.give_up()
        derived = parked is not None and parked.derivation is self and parked.is_derivable()
        if self._is_lost:
            self._restore(parameter, parked)
            derived = parked is not None and self.copy_of is None
        if self._is_kept_next:
            assert course.kept_at is not None
            course.bring(self, parameter.detach(), course.kept_at)
            if parked is not None and parked.derivation is self and parked.write_copy():
                self.kept()
                derived = True
            else:
                self.copy_of = self.now, parameter.detach().clone()
        course.bring(self, parameter.detach(), course.end)
        if parked is not None:
            parked.note_derived(derived)
            if parked.where is not Where.HERE:
                self.kept()
        self._note(parameter)

    def _restore(self, parameter: nn.Parameter, parked: ParkedWeight | None) -> None:
        before, self.now = self.copy_of, (-1, 0)
        if before is not None:
            parameter.detach().copy_(before[1])
            self.now = before[0]
        elif parked is not None and parked.restore():
            self.now = self._kept
        else:
            self._check()

    def _check(self) -> None:
        if self.now[0] < 0:
            raise OffloadError(
                f"An earlier error came while MeZO changed the weight {self._name}: load a checkpoint into the model, and "
                "make a new optimizer."
            )

    def _note(self, parameter: nn.Parameter) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._version, self._storage = parameter._version, parameter.untyped_storage()._cdata

    def check_unchanged(self) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` if something else has changed the weight since it moved."""
        parameter = self._parameter()
        if parameter is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            is_other = parameter.untyped_storage()._cdata != self._storage
            if not is_other and parameter._version == self._version:
                return
        parked = _parked_of(parameter)
        self._note(parameter)
        back = "it stays so: load a checkpoint"
        if (
            not is_other
            and parked is not None
            and parked.derivation is self
            and self._kept[0] >= 0
            and parked.restore()
        ):
            self.now, back = self._kept, "it goes back"
            self.guard()
        how = "given other memory, such as by .data = ... or half()" if is_other else "changed in place"
        raise OffloadError(
            f"The weight {self._name} was {how}, while a loss is computed that goes on from what it was, and {back}. Leave "
            "that out, change it between steps, or let weights be in memory (params='none')."
        )


_OWED = "mezo"


def _parked_of(parameter: nn.Parameter) -> ParkedWeight | None:
    found = parked_of(parameter) if torch._C._has_storage(parameter) else None
    return found if isinstance(found, ParkedWeight) else None
