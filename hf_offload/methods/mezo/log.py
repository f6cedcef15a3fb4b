"""What each step of MeZO was, and its replay: with the weights at the beginning, a log gives those of any step."""

import dataclasses
import gzip
import itertools
import json
import math
import os
import textwrap
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.interrupts import signals_deferred
from hf_offload.methods.mezo.directions import (
    BACK,
    MINUS,
    PLUS,
    Move,
    Shift,
    Update,
    checksum,
    make_moves,
    memory_for,
)

LOG_FILE = "mezo_log.json.gz"
"""Its name in a checkpoint."""
STAGES = 4
"""Moves of a step: to ``+1``, to ``-1``, back, and the update."""
UPDATE = 3
"""The stage of the update."""

_KEY = "mezo"


class Row(NamedTuple):
    """A step.

    Attributes:
        seed: Of its direction.
        gradient: The projected gradient; NaN where weights went there and back, and no update was made.
        rates, decays: Learning rate and weight decay of each parameter group.
    """

    seed: int
    gradient: float
    rates: tuple[float, ...]
    decays: tuple[float, ...]

    @property
    def updates(self) -> bool:
        """Whether an update was made."""
        return not math.isnan(self.gradient)


class Trained(NamedTuple):
    """A weight and its parameter group. ``cpu``, ``cuda`` ...: each device draws other numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    group: int

    @classmethod
    def of(cls, name: str, weight: Tensor, group: int) -> Self:
        """What the log says of ``weight``."""
        return cls(name, tuple(weight.shape), str(weight.dtype), weight.device.type, group)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What does not change between steps: the weights, in the order in which directions are drawn, and settings."""

    weights: tuple[Trained, ...]
    eps: float
    seed: int

    def moves(self, row: Row, group: int, first: int = 0, last: int = STAGES) -> list[Move]:
        """Those of a weight of this ``group`` in a step, from one stage to another."""
        moves: list[Move] = [Shift(scale, self.eps) for scale in (PLUS, MINUS, BACK)]
        if row.updates:
            moves.append(Update(row.gradient, row.rates[group], row.decays[group]))
        return moves[first:last]

    def check(self, saved: "Setup") -> None:
        """Raise :class:`~hf_offload.errors.OffloadConfigError` unless ``saved`` is the same."""
        wrong = differences(vars(self), vars(saved), "the optimizer")
        if wrong:
            raise OffloadConfigError(
                f"The state was saved with {wrong}: resume with the same, or start without the state."
            )


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], me: str) -> str:
    """What is different, with both values: of a table, its first line that is."""
    return "; ".join(
        f"{key}={_short(theirs.get(key), value)}, and {me} has {_short(value, theirs.get(key))}"
        for key, value in mine.items()
        if theirs.get(key) != value
    )


def _short(value: Any, other: Any) -> str:
    if isinstance(value, tuple) and isinstance(other, tuple):
        value = next(one for one, two in itertools.zip_longest(value, other) if one != two)
    return textwrap.shorten(repr(value), 200)


@dataclasses.dataclass
class MezoLog:
    """All steps so far.

    Attributes:
        setup: What does not change.
        rows: The steps.
        initial: The checksum of each weight before the first step; empty without steps.
        final: After the last one, where the log was saved with it.
    """

    setup: Setup
    rows: list[Row] = dataclasses.field(default_factory=list)
    initial: tuple[int, ...] = ()
    final: tuple[int, ...] = ()

    def state(self) -> dict[str, Any]:
        """For a state dict of an optimizer, which loads with ``weights_only=True``, and for JSON."""
        return {_KEY: _tuples(vars(self) | {"setup": vars(self.setup)})}

    @classmethod
    def from_state(cls, state: Any, what: str = "The state") -> Self:
        """What :meth:`state` gave, which is called ``what``.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if it is another optimizer's, or damaged.
        """
        try:
            values = _tuples(state[_KEY])
            weights = tuple(Trained(*one) for one in values["setup"]["weights"])
            setup = Setup(**values["setup"] | {"weights": weights})
            return cls(setup, [Row(*row) for row in values["rows"]], values["initial"], values["final"])
        except (LookupError, TypeError) as error:
            raise OffloadConfigError(
                f"{what} was not saved by MeZO, or is damaged ({error!r}): go on with the optimizer that saved it, or start "
                "without its state."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all."""
        part = Path(f"{os.fspath(path)}.part")
        part.write_bytes(gzip.compress(json.dumps(self.state()).encode(), mtime=0))
        part.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """From a file, or from the folder of a checkpoint. Raises :class:`~hf_offload.errors.OffloadConfigError` where there
        is none, or a damaged one.
        """
        file = Path(path) / LOG_FILE if Path(path).is_dir() else Path(path)
        try:
            state = json.loads(gzip.decompress(file.read_bytes()))
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise OffloadConfigError(
                f"{file} cannot be read as a log of MeZO ({error}): give a {LOG_FILE}, or a checkpoint that has one."
            ) from error
        return cls.from_state(state, str(file))


def _tuples(value: Any) -> Any:
    """Without lists and named tuples."""
    if isinstance(value, dict):
        return {key: _tuples(one) for key, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


@torch.no_grad()
def replay(
    log: MezoLog,
    weights: Mapping[str, Tensor],
    steps: int | None = None,
    *,
    on_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Make the first ``steps`` of ``log`` (default: all) on ``weights``, which are as they were before the first one, and
    change in place. No data, no forward.

    Aborted steps count: there may be more of them than updates. ``on_step`` is called with the number of steps made.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for weights that are not those the log knows, and
    :class:`~hf_offload.errors.OffloadError` if they do not become those that it knows later: something else than MeZO has
    changed them meanwhile, or another device or version of PyTorch draws other numbers here.
    """
    setup = log.setup
    count = len(log.rows) if steps is None else steps
    if not 0 <= count <= len(log.rows):
        raise OffloadConfigError(f"steps={count}: the log has {len(log.rows)} steps.")
    given = tuple(Trained.of(one.name, weights[one.name], one.group) for one in setup.weights if one.name in weights)
    wrong = differences({"weights": setup.weights}, {"weights": given}, "the log")
    if wrong:
        raise OffloadConfigError(f"{wrong}: give the weights as they were trained. Other devices draw other numbers.")
    chosen = [weights[one.name] for one in setup.weights]
    changed = _different(log.initial, chosen, setup)
    if changed:
        raise OffloadConfigError(
            f"{changed} not what they were before the first step: give the weights training began with."
        )
    for number, row in enumerate(log.rows[:count], 1):
        with signals_deferred:
            generator = torch.Generator(chosen[0].device).manual_seed(row.seed)
            for weight, one in zip(chosen, setup.weights, strict=True):
                make_moves(weight, memory_for(weight, weight.device), generator, setup.moves(row, one.group))
        on_step(number)
    changed = _different(log.final, chosen, setup) if count == len(log.rows) else ""
    if changed:
        raise OffloadError(
            f"{changed} not what they were after the last step. Something other than MeZO has changed them in the training, "
            "such as load_best_model_at_end, another checkpoint or a callback; or other numbers are drawn here: training "
            f"was on {setup.weights[0].device!r}, and other devices and versions of PyTorch draw others."
        )


def _different(known: Sequence[int], weights: Sequence[Tensor], setup: Setup) -> str:
    """Which of ``weights`` have another checksum, if ``known`` are there."""
    pairs = zip(setup.weights, known, weights, strict=bool(known))
    wrong = [one.name for one, digest, weight in pairs if digest != checksum(weight)]
    return f"{len(wrong)} of {len(weights)} weights, such as {wrong[0]}, are" if wrong else ""
