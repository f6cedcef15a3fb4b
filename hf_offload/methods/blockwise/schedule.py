"""Which blocks train, and when: settings of block-wise training, the turns that follow from them, and the bytes they need."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from hf_offload.errors import OffloadConfigError
from hf_offload.methods.blockwise.freezing import is_waiting
from hf_offload.settings.classes import counted, settings
from hf_offload.settings.load import choose, collect_errors, nearest
from hf_offload.settings.shown import shown
from hf_offload.settings.values import Flag, Reader, Whole, items, one_of
from hf_offload.structure.units import find_blocks

HALF = (torch.float16, torch.bfloat16)
"""Dtypes of weights that a step changes by way of float32 copies, if those are asked for."""
ORDERS = ("draw", "random", "ascending", "descending")
OUTSIDE = ("always", "turns", "never")
INACTIVE_STATE = ("drop", "keep")


def _order(name: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        choose(name, value, ORDERS)
        return value
    names = tuple(items(value))
    if not names or not all(isinstance(one, str) for one in names) or len(set(names)) < len(names):
        raise OffloadConfigError(
            f"{name}={shown(value)}: pass one of {', '.join(ORDERS)}, or names of blocks, each once."
        )
    return names


@settings(frozen=True, kw_only=True)
class BlockwiseConfig:
    """Only a few of a model's repeated blocks train at a time; the others are frozen, and have neither gradients nor state.

    Args:
        blocks_active: So many blocks train together.
        switch_every: Optimizer steps until others take their turn.
        order: ``"draw"``: a new random set each turn (LISA, Pan et al. 2024, arXiv 2403.17919). The others go through all
            blocks once before one comes again: ``"random"``, in another order each time round, ``"ascending"`` from the
            inputs to the outputs, ``"descending"`` (BAdam, Luo et al. 2024, arXiv 2404.02827), or the names of blocks in
            their order; blocks that are not named never train then.
        outside: What lies outside of the repeated blocks (embeddings, final norm, head) trains ``"always"``, takes
            ``"turns"`` like blocks, each of these modules as one, or ``"never"`` trains.
        seed: Draws depend on it and on the number of the turn alone, so all processes draw the same.
        master_weights: Parameters in 16 bits have a copy in float32 while they train, which the updates go to.
        inactive_state: State of blocks whose turn is over: ``"drop"`` it, or ``"keep"`` it until they train again, where the
            model is on an accelerator in the RAM of the host. It is part of each checkpoint then.
    """

    blocks_active: Annotated[Whole, counted("blocks", ge=1)] = 1
    switch_every: Annotated[Whole, counted("steps", ge=1)] = 100
    order: Annotated[
        str | Sequence[str], Reader(_order, {"type": ["string", "array"], "items": {"type": "string"}})
    ] = "random"
    outside: Annotated[str, one_of(OUTSIDE)] = "always"
    seed: Annotated[Whole, Field(ge=-(2**63))] = 0
    master_weights: Flag = True
    inactive_state: Annotated[str, one_of(INACTIVE_STATE)] = "drop"


@dataclasses.dataclass(frozen=True)
class Units:
    """What is frozen and trained as one.

    Attributes:
        parameters: Names of parameters by the unit's name, in the order of the model; each in one unit only.
        blocks: Names of the units that are repeated blocks; the others lie outside of them.
    """

    parameters: dict[str, tuple[str, ...]]
    blocks: tuple[str, ...]

    @property
    def outside(self) -> tuple[str, ...]:
        """Names of the units that lie outside of the repeated blocks."""
        return tuple(name for name in self.parameters if name not in self.blocks)


def find_trainable_units(model: nn.Module, names: Mapping[int, str]) -> Units:
    """The model's units, of the parameters in ``names`` (id of a parameter: its name); units without any are left out.

    Units are the repeated blocks, and the outermost modules around them. A parameter that several modules share belongs to
    the first of them.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if there are no repeated blocks, or none of them has a parameter.
    """
    repeated = find_blocks(model)
    if not repeated:
        raise OffloadConfigError(
            f"{type(model).__name__} has no repeated blocks (transformers' GradientCheckpointingLayer), so there is nothing "
            "that could take turns: use a model of transformers, or another optimizer."
        )
    parameters: dict[str, tuple[str, ...]] = {}
    taken: set[int] = set()

    def walk(name: str, module: nn.Module) -> None:
        holds_blocks = any(block.startswith(f"{name}." if name else "") for block in repeated)
        mine = [p for p in module.parameters(recurse=not holds_blocks) if id(p) in names and id(p) not in taken]
        taken.update(map(id, mine))
        if mine:
            parameters[name or type(model).__name__] = tuple(names[id(p)] for p in mine)
        if holds_blocks:
            for child, part in module.named_children():
                walk(f"{name}.{child}" if name else child, part)

    walk("", model)
    blocks = tuple(name for name in parameters if name in repeated)
    if not blocks:
        raise OffloadConfigError(
            f"No parameter in the {len(repeated)} repeated blocks of {type(model).__name__} is trainable: let some require "
            "gradients before the optimizer is built."
        )
    return Units(parameters, blocks)


class Schedule:
    """Which units train in which turn.

    Attributes:
        always: Units that train in every turn.
        turns: Units that take turns, in the order of the model (or in the order that was given).

    Raises :class:`~hf_offload.errors.OffloadConfigError` that lists all that does not fit this model.
    """

    def __init__(self, units: Units, config: BlockwiseConfig):
        self._config = config
        self._blocks = units.blocks
        self.always = units.outside if config.outside == "always" else ()
        known = list(units.parameters) if config.outside == "turns" else list(units.blocks)
        self.turns = known if isinstance(config.order, str) else list(config.order)
        with collect_errors("settings of block-wise training") as check:
            for name in self.turns:
                with check:
                    if name not in known:
                        raise OffloadConfigError(
                            f"order names {name!r}, which is not a trainable block of this model.{nearest(name, known)} "
                            f"Blocks: {', '.join(known)}."
                        )
            with check:
                if config.blocks_active > len(self.turns):
                    raise OffloadConfigError(
                        f"blocks_active={config.blocks_active}, but only {len(self.turns)} blocks take turns: "
                        f"{', '.join(self.turns)}."
                    )

    @property
    def names(self) -> list[str]:
        """All units that ever train."""
        return [*self.always, *self.turns]

    @property
    def cycle(self) -> int:
        """Turns until every block had its turn; with ``order="draw"``, only on average."""
        return -(-len(self.turns) // self._config.blocks_active)

    def turn(self, number: int) -> tuple[str, ...]:
        """Units that train in turn ``number``, counted from 0."""
        count = self._config.blocks_active
        if self._config.order == "draw":
            return self.always + tuple(self._shuffled(number)[:count])
        around, place = divmod(number, self.cycle)
        order = self.turns
        if self._config.order == "random":
            order = self._shuffled(around)
        elif self._config.order == "descending":
            order = order[::-1]
        return self.always + tuple(order[count * place : count * (place + 1)])

    def largest(self, nbytes: Mapping[str, int]) -> int:
        """Most bytes that units of one turn can have together; ``nbytes`` by unit."""
        count = self._config.blocks_active
        if self._config.order in ("draw", "random"):
            drawn = sum(sorted((nbytes[name] for name in self.turns), reverse=True)[:count])
            return drawn + sum(nbytes[name] for name in self.always)
        return max(sum(nbytes[name] for name in self.turn(number)) for number in range(self.cycle))

    def deepest(self) -> tuple[str, ...]:
        """Units of a turn whose first block is the first of all that take turns: backward goes no deeper in any other."""
        count = self._config.blocks_active
        first = min(self.turns, key=self._depth)
        if self._config.order in ("draw", "random"):
            others = sorted((name for name in self.turns if name != first), key=self._depth)
            return (*self.always, first, *others[: count - 1])
        return next(turn for turn in map(self.turn, range(self.cycle)) if first in turn)

    def _depth(self, name: str) -> tuple[bool, int]:
        return (False, self._blocks.index(name)) if name in self._blocks else (True, 0)

    def _shuffled(self, number: int) -> list[str]:
        # A text as a seed is hashed whole: neighbouring numbers give draws that have nothing to do with each other.
        draw = random.Random(f"{self._config.seed}/{number}")
        return draw.sample(self.turns, len(self.turns))


_SINGLE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class BlockwiseBytes:
    """Most bytes of each kind in any turn, counted apart, so their sum may belong to no single turn of a mixed model.

    Attributes:
        gradients: Of the parameters that train, in their own dtype.
        state: The inner optimizer's.
        all_state: That of all blocks together: what there is where no state is dropped, of which all but ``state`` waits.
        masters: float32 copies of 16-bit parameters.
        step_gradients: float32 copies of their gradients, while a step runs.
    """

    gradients: int
    state: int
    all_state: int
    masters: int
    step_gradients: int


def peak_bytes(model: nn.Module, config: BlockwiseConfig) -> BlockwiseBytes:
    """What a :class:`BlockwiseOptimizer` with AdamW over all trainable parameters of ``model`` needs at most, per process.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if the settings do not fit the model.
    """
    trainable, units, schedule = _plan_turns(model, config)

    def has_master(parameter: Tensor) -> bool:
        return config.master_weights and parameter.dtype in HALF

    def state(parameter: Tensor) -> int:
        size = _SINGLE_BYTES if has_master(parameter) else parameter.element_size()
        return 2 * parameter.numel() * size + _SINGLE_BYTES

    def by_unit(of: Callable[[Tensor], int]) -> dict[str, int]:
        return {unit: sum(of(trainable[name]) for name in names) for unit, names in units.parameters.items()}

    def largest(of: Callable[[Tensor], int]) -> int:
        return schedule.largest(by_unit(of))

    masters = largest(lambda p: _SINGLE_BYTES * p.numel() if has_master(p) else 0)
    states = by_unit(state)
    all_state = sum(states[name] for name in schedule.names)
    return BlockwiseBytes(largest(lambda p: p.nbytes), schedule.largest(states), all_state, masters, masters)


def deepest_turn(model: nn.Module, config: BlockwiseConfig) -> set[str]:
    """Names of the parameters that train in a turn in which backward goes through most of ``model``'s blocks, and so needs
    most of what their forward saved.

    Raises as :func:`peak_bytes` does.
    """
    _, units, schedule = _plan_turns(model, config)
    return {name for unit in schedule.deepest() for name in units.parameters[unit]}


def _plan_turns(model: nn.Module, config: BlockwiseConfig) -> tuple[dict[str, nn.Parameter], Units, Schedule]:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad or is_waiting(p)}
    units = find_trainable_units(model, {id(p): name for name, p in trainable.items()})
    return trainable, units, Schedule(units, config)
