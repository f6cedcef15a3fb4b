"""Weights that move when they are used: of those whose memory comes and goes, none comes for a move alone.

Note: what is written
    A weight goes ``+1``, ``-2``, back and along the update, by moves that are known for all weights before it is used. When
    its memory comes, it makes those that it has not made; it goes without being written where the same moves lead
    there from what was written before. So a step reads a weight once for each forward pass, and writes it once.
    The operations of each weight and their order are those of weights in memory, and so are the bits.
    A weight that is to be as it was (``restore="pristine"``) is written before it moves, and read again instead of going
    back: as often as one that goes back.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hf_offload.errors import OffloadError
from hf_offload.optimizers.mezo.apart import Unchanging
from hf_offload.optimizers.mezo.directions import Directions, Move, Shift, Update
from hf_offload.optimizers.mezo.pairs import UnfitError
from hf_offload.state.contexts import outside

Place = tuple[int, int]
"""The number of a stage of the way, and how many of its moves were made."""


class Course:
    """All moves of ``weights``, by name, of which each weight makes those that it has not made when it is used.

    Attributes:
        parameters: The weights.
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
        self.parameters = list(weights.values())
        self._weights = weights
        self._directions = Directions(self.parameters)
        self._stages: dict[int, _Stage] = {}
        self._begun = 0  # the stage that the present step began with
        self.lock = threading.RLock()
        self.end: Place = (0, 0)
        self.kept_at: Place | None = None
        self.is_seen = self.was_seen = self.is_computing = False
        self.turning: set[int] = set()
        self._moving = [MovingWeight(self, number, name) for number, name in enumerate(weights)]

    def begin_step(self) -> None:
        """The moves to come are those of another step. Weights that no pass of the last step has used make its moves now."""
        last = self._begun
        self._settle(one.number for one in self._moving if one.now[0] < last)
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
            return
        with Unchanging(self._weights) as mode:
            yield
        if mode.error is not None:
            raise mode.error

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
        self._settle(one.number for one in copied)
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
            for parameter in self.parameters:
                about_to_change(parameter)
            number, count = self.end
            if number not in self._stages:
                self._stages[number] = _Stage(seed, {0: self._directions.generator(seed).get_state()})
            self._stages[number].moves.append(move_of)
            self.end = (number, count + 1)
        self._inform()
        torch.clear_autocast_cache()

    def _inform(self) -> None:
        """Let all weights know when they are used, and move at once what is read without asking."""
        seen: list[int] = []
        for parameter, moving in zip(self.parameters, self._moving, strict=True):
            residence = residence_of(parameter)
            # Backward of older graphs is an error.
            if residence is None:
                torch.autograd.graph.increment_version(parameter)
                if demand_of(parameter) is not moving:
                    complete(parameter)  # what an optimizer that has gone has left
                    demanded(parameter, moving)
                with torch._C.DisableTorchFunctionSubclass():  # which would let it move
                    is_seen = held_elsewhere(parameter)
            else:
                residence.count_change()
                if residence.derivation is not moving:
                    if demand_of(parameter) is not moving:
                        complete(parameter)
                    demanded(parameter, None)
                    residence.derive(moving)
                with torch._C.DisableTorchFunctionSubclass():
                    is_seen = residence.may_be_seen
            if is_seen:
                seen.append(moving.number)
        self.is_seen = bool(seen)
        self._settle(seen)

    def _settle(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            parameter = self.parameters[number]
            with in_memory([parameter]):
                complete(parameter)

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
    """How far one weight is: a :class:`~hf_offload.parameters.derivation.Derivation` if its memory comes and goes, or else a
    :class:`~hf_offload.parameters.waiting.Demand`.

    Attributes:
        number: In the order in which directions are drawn.
        now: Where the value in memory is.
        copy_of: A place, and the value there, of a weight that is kept in memory instead of on the tier.
    """

    def __init__(self, course: Course, number: int, name: str):
        self._course = course
        self._name = name
        self.number = number
        self.now = self._kept = course.end
        self.copy_of: tuple[Place, Tensor] | None = None

    # -- Derivation -----------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        turning = self._course.turning
        if turning and threading.get_ident() not in turning:
            self._course.give_up()
        return self.now != self._course.end

    @property
    def is_lost(self) -> bool:
        return self.copy_of is None and self._course.is_lost(self.now)

    @property
    def is_fixed(self) -> bool:
        return self._course.is_computing

    @property
    def may_come_again(self) -> bool:
        return self._kept == self._course.kept_at or self.is_lost

    @property
    def is_kept_next(self) -> bool:
        place = self._course.kept_at
        return (
            place is not None and self.now <= place < self._course.end and self.copy_of is None and self._kept != place
        )

    @property
    def may_go(self) -> bool:
        # From what was kept in an earlier step, one more direction would have to be drawn.
        return self._kept[0] == self.now[0]

    def arrived(self) -> None:
        self.now = self._kept

    def kept(self) -> None:
        self._kept = self.now

    def changes_in_sight(self) -> None:
        if self._course.turning:
            self._course.give_up()

    def copy(self, value: Tensor) -> None:
        self.copy_of = self.now, value.clone()

    def derive(self, value: Tensor) -> None:
        if self.now[0] < 0:
            raise OffloadError(
                f"An earlier error came while MeZO changed the weight {self._name}: load a checkpoint into the model, and "
                "make a new optimizer."
            )
        course = self._course
        if self.copy_of is not None and course.is_lost(self.now):
            self.now, before = (-1, 0), self.copy_of
            with outside():
                value.copy_(before[1])
            self.now = before[0]
        target = course.kept_at if self.is_kept_next else None
        course.bring(self, value, course.end if target is None else target)

    # -- Demand ---------------------------------------------------------------------------------------------------------

    has_gradient = False

    def finish(self) -> None:
        parameter = self._course.parameters[self.number]
        if not self.is_due:
            return
        with in_memory([parameter]), outside(), self._course.lock:
            if self.is_due:  # no other thread has moved it meanwhile
                if held_elsewhere(parameter):
                    self.changes_in_sight()
                if self.is_kept_next:
                    self.derive(parameter.detach())
                    self.copy(parameter.detach())
                self.derive(parameter.detach())

    def overwrite(self) -> None:
        self.finish()

    def check_gradient(self) -> None:
        pass

    def reveal_gradient(self) -> None:
        pass

    def replace_gradient(self, zeros: bool) -> None:
        pass
