"""What each step of MeZO was, and its replay: with the weights at the beginning, a log gives those of any step."""

import dataclasses
import gzip
import json
import math
import os
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

    def update_of(self, group: int) -> Update:
        """The update of a weight of this parameter group."""
        return Update(self.gradient, self.rates[group], self.decays[group])


@dataclasses.dataclass(frozen=True)
class Setup:
    """What does not change between steps.

    Attributes:
        names, shapes, dtypes: Of the weights, in the order in which directions are drawn.
        groups: The parameter group of each.
        eps, restore, seed: Settings of the optimizer.
        device: ``cpu``, ``cuda`` ...: each draws other numbers.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    groups: tuple[int, ...]
    eps: float
    restore: str
    seed: int
    device: str

    def check(self, saved: "Setup") -> None:
        """Raise :class:`~hf_offload.errors.OffloadConfigError` unless ``saved`` is the same."""
        pairs = {one.name: (getattr(saved, one.name), getattr(self, one.name)) for one in dataclasses.fields(self)}
        wrong = [
            f"{name}={_short(theirs)}, and the optimizer has {_short(mine)}"
            for name, (theirs, mine) in pairs.items()
            if mine != theirs
        ]
        if wrong:
            raise OffloadConfigError(
                f"The state was saved with {'; '.join(wrong)}: resume with the same, or start without the state."
            )


def _short(value: Any) -> str:
    if not isinstance(value, tuple):
        return repr(value)
    return f"{len(value)} values ({', '.join(map(str, value[:2]))} ...)"


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

    # -- in a state dict, and in a file ---------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """As JSON, compressed."""
        values = {
            "setup": dataclasses.asdict(self.setup),
            "rows": self.rows,
            "initial": self.initial,
            "final": self.final,
        }
        return gzip.compress(json.dumps(values).encode(), mtime=0)

    @classmethod
    def from_bytes(cls, content: bytes, what: str) -> Self:
        """What :meth:`to_bytes` gave, which is called ``what``."""
        try:
            values = json.loads(gzip.decompress(content))
            setup = Setup(**{name: _tuples(value) for name, value in values["setup"].items()})
            rows = [Row(*map(_tuples, row)) for row in values["rows"]]
            return cls(setup, rows, _tuples(values["initial"]), _tuples(values["final"]))
        except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
            raise OffloadConfigError(
                f"{what} is damaged, or no log of MeZO ({error}): give a {LOG_FILE}, or a checkpoint that has one."
            ) from error

    def state(self) -> dict[str, Any]:
        """For a state dict of an optimizer, which loads with ``weights_only=True``."""
        return {_KEY: torch.frombuffer(bytearray(self.to_bytes()), dtype=torch.uint8)}

    @classmethod
    def from_state(cls, state_dict: Mapping[str, Any]) -> Self:
        """Of a state dict. Raises :class:`~hf_offload.errors.OffloadConfigError` if it is another optimizer's, or damaged."""
        if _KEY not in state_dict:
            raise OffloadConfigError(
                "This state was not saved by MeZO: go on with the optimizer that saved it, or start without its state."
            )
        return cls.from_bytes(state_dict[_KEY].cpu().numpy().tobytes(), "This state of MeZO")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all."""
        part = Path(f"{os.fspath(path)}.part")
        part.write_bytes(self.to_bytes())
        part.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """From a file, or from the folder of a checkpoint. Raises :class:`~hf_offload.errors.OffloadConfigError` where there
        is none, or a damaged one.
        """
        file = Path(path) / LOG_FILE if Path(path).is_dir() else Path(path)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise OffloadConfigError(
                f"{file} cannot be read as a log of MeZO ({error}): give a {LOG_FILE}, or a checkpoint that has one."
            ) from error
        return cls.from_bytes(content, str(file))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# -- replay -------------------------------------------------------------------------------------------------------------


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
    chosen = _chosen(setup, weights)
    wrong = _different(log.initial, chosen, log)
    if wrong:
        raise OffloadConfigError(
            f"{wrong} not what they were before the first step: give the weights training began with."
        )
    for number, row in enumerate(log.rows[:count], 1):
        with signals_deferred:
            generator = torch.Generator(chosen[0].device).manual_seed(row.seed)
            for weight, group in zip(chosen, setup.groups, strict=True):
                moves: list[Move] = []
                if setup.restore == "reference":  # which leaves rounding errors behind
                    moves += [Shift(scale, setup.eps) for scale in (PLUS, MINUS, BACK)]
                if row.updates:
                    moves.append(row.update_of(group))
                make_moves(weight, memory_for(weight, weight.device), generator, moves)
        on_step(number)
    wrong = _different(log.final, chosen, log) if count == len(log.rows) else ""
    if wrong:
        raise OffloadError(
            f"{wrong} not what they were after the last step. Something other than MeZO has changed them in the training, "
            "such as load_best_model_at_end, another checkpoint or a callback; or other numbers are drawn here: training "
            f"was on {setup.device!r}, and other devices and versions of PyTorch draw others."
        )


def _different(known: tuple[int, ...], weights: Sequence[Tensor], log: MezoLog) -> str:
    """Which of ``weights`` have another checksum, if ``known`` are there."""
    wrong = [
        name
        for name, one, weight in zip(log.setup.names, known, weights, strict=bool(known))
        if one != checksum(weight)
    ]
    return f"{len(wrong)} of {len(weights)} weights, such as {wrong[0]}, are" if wrong else ""


def _chosen(setup: Setup, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The weights that were trained, where those given have them."""
    wrong = []
    for name, *logged in zip(setup.names, setup.shapes, setup.dtypes, strict=True):
        one = weights.get(name)
        found = None if one is None else [tuple(one.shape), str(one.dtype), one.device.type]
        expected = [*logged, setup.device]
        if found != expected:
            wrong.append(f"{name} is {found or 'not there'}, and in the log {expected}")
    if wrong:
        raise OffloadConfigError(
            f"{len(wrong)} of {len(setup.names)} weights are not those of the log: {wrong[0]}. Give the weights as they were "
            "trained. Other devices draw other numbers."
        )
    return [weights[name] for name in setup.names]
