"""Weights that move when they are used: of those whose memory comes and goes, none comes for a move alone.

Note: what is written
    A weight goes ``+1``, ``-2``, back and along the update, by moves that are known for all weights before it is used. When
    its memory comes, it makes those that it has not made; it goes without being written where the same moves lead
    there from what was written before. So a step reads a weight once for each forward pass, and writes it once.
    The operations of each weight and their order are those of weights in memory, and so are the bits.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from hf_offload.errors import OffloadError
from hf_offload.optimizers.mezo.directions import Directions, Move, Shift, Update
from hf_offload.parameters.contexts import outside
from hf_offload.parameters.demand import demanded, held_elsewhere
from hf_offload.parameters.waiting import about_to_change, complete, demand_of, in_memory, residence_of


class Course:
    """All moves of ``weights``, by name, of which each weight makes those that it has not made when it is used.

    Attributes:
        parameters: The weights.
        end: The number of the present step, and how many moves it has.
    """

    def __init__(self, weights: dict[str, nn.Parameter]):
        self.parameters = list(weights.values())
        self._directions = Directions(self.parameters)
        self._steps: dict[int, _Step] = {}
        self._lock = threading.RLock()
        self.end = (0, 0)
        self._moving = [MovingWeight(self, number, name) for number, name in enumerate(weights)]

    def begin_step(self) -> None:
        """The moves to come are those of another step. Weights that no pass of the last step has used make its moves now."""
        last = self.end[0]
        self._settle(one.number for one in self._moving if one.now[0] < last)
        with self._lock:
            self._steps = {number: step for number, step in self._steps.items() if number >= last}
            self.end = (last + 1, 0)

    def move(self, shift: Shift) -> None:
        """Let all weights make this move."""
        self._add(shift.seed, lambda number: shift)

    def update(self, updates: Sequence[Update]) -> None:
        """Let each weight make its update."""
        self._add(updates[0].seed, lambda number: updates[number])

    def _add(self, seed: int, move_of: Callable[[int], Move]) -> None:
        with self._lock:
            for parameter in self.parameters:
                about_to_change(parameter)
            number, count = self.end
            if number not in self._steps:
                self._steps[number] = _Step(seed, {0: self._directions.generator(seed).get_state()})
            self._steps[number].moves.append(move_of)
            self.end = (number, count + 1)
        self._inform()

    def _inform(self) -> None:
        """Let all weights know when they are used, and move at once what is read without asking."""
        seen: list[int] = []
        for parameter, moving in zip(self.parameters, self._moving, strict=True):
            torch.autograd.graph.increment_version(parameter)  # backward of older graphs is an error
            residence = residence_of(parameter)
            if residence is None:
                if demand_of(parameter) is not moving:
                    complete(parameter)  # what an optimizer that has gone has left
                    demanded(parameter, moving)
                with torch._C.DisableTorchFunctionSubclass():  # which would let it move
                    is_seen = held_elsewhere(parameter)
            else:
                if residence.derivation is not moving:
                    if demand_of(parameter) is not moving:
                        complete(parameter)
                    demanded(parameter, None)
                    residence.derive(moving)
                with torch._C.DisableTorchFunctionSubclass():
                    is_seen = residence.may_be_seen
            if is_seen:
                seen.append(moving.number)
        self._settle(seen)

    def _settle(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            parameter = self.parameters[number]
            with in_memory([parameter]):
                complete(parameter)

    def bring(self, moving: "MovingWeight", value: Tensor) -> None:
        """Let ``value``, which is where ``moving`` says, make the moves that are left."""
        with self._lock, outside():
            ways = []
            for number in range(moving.now[0], self.end[0] + 1):
                step = self._steps.get(number)
                made = moving.now[1] if number == moving.now[0] else 0
                if step is not None and made < len(step.moves):
                    moves = [move_of(moving.number) for move_of in step.moves[made:]]
                    ways.append((step, self._generator(step, moving.number), moves))
            moving.now = (-1, 0)
            self._directions.make([(generator, moves) for _, generator, moves in ways], value)
            moving.now = self.end
            for step, generator, _ in ways:
                step.states.setdefault(moving.number + 1, generator.get_state())

    def _generator(self, step: "_Step", number: int) -> torch.Generator:
        """At the beginning of the direction of the weight of this number."""
        place = max(known for known in step.states if known <= number)
        generator = self._directions.generator(step.seed)
        generator.set_state(step.states[place])
        for passed in range(place, number):
            self._directions.skip(passed, generator)
            step.states[passed + 1] = generator.get_state()
        return generator


class _Step:
    """The moves of one step.

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
    """How far one weight is: a :class:`~hf_offload.parameters.saved.Derivation` if its memory comes and goes, or else a
    :class:`~hf_offload.parameters.waiting.Demand`.

    Attributes:
        number: In the order in which directions are drawn.
        now: The step, and how many moves of it the value in memory has made.
    """

    def __init__(self, course: Course, number: int, name: str):
        self._course = course
        self._name = name
        self.number = number
        self.now = self._kept = course.end

    # -- Derivation -----------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        return self.now != self._course.end

    @property
    def may_go(self) -> bool:
        # From what was kept in an earlier step, one more direction would have to be drawn.
        return self._kept[0] == self.now[0]

    def arrived(self) -> None:
        self.now = self._kept

    def kept(self) -> None:
        self._kept = self.now

    def derive(self, value: Tensor) -> None:
        if self.now[0] < 0:
            raise OffloadError(
                f"An earlier error came while MeZO changed the weight {self._name}: load a checkpoint into the model, and "
                "make a new optimizer."
            )
        self._course.bring(self, value)

    # -- Demand ---------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        parameter = self._course.parameters[self.number]
        if self.is_due:
            with in_memory([parameter]):
                self.derive(parameter.detach())

    def overwrite(self) -> None:
        self.finish()

    def reveal_gradient(self) -> None:
        pass

    def replace_gradient(self, zeros: bool) -> None:
        pass
