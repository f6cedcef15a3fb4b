"""What each step of MeZO was: with the weights at the beginning, it gives the weights at any step, bit for bit."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import xxhash
from torch import Tensor

from hf_offload.errors import OffloadConfigError
from hf_offload.optimizers.mezo.directions import Update
from hf_offload.settings.load import collect_errors

LOG_FILE = "mezo_log.safetensors"
"""Its name in a checkpoint."""

_KEY = "mezo"
_TABLES = ("rates", "decays")


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

    def updates_of(self, groups: Sequence[int]) -> list[Update]:
        """The update of each weight, of these parameter groups."""
        return [Update(self.seed, self.gradient, self.rates[group], self.decays[group]) for group in groups]


class Known(NamedTuple):
    """Weights at some time.

    Attributes:
        steps: How many steps were made before.
        sums: The checksum of each weight.
    """

    steps: int
    sums: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Setup:
    """What does not change between steps.

    Attributes:
        names, shapes, dtypes: Of the weights, in the order in which directions are drawn.
        groups: The parameter group of each.
        group_count: How many groups there are; some may be empty.
        eps, restore, seed: Settings of the optimizer.
        device: ``cpu``, ``cuda`` ...: each draws other numbers.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    groups: tuple[int, ...]
    group_count: int
    eps: float
    restore: str
    seed: int
    device: str

    def as_text(self) -> str:
        """JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """What :meth:`as_text` gave."""
        found: dict[str, Any] = json.loads(text)
        found["shapes"] = [tuple(shape) for shape in found["shapes"]]
        values: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in found.items()}
        return cls(**values)

    def check(self, saved: "Setup") -> None:
        """Raise :class:`~hf_offload.errors.OffloadConfigError` unless ``saved`` is the same."""
        with collect_errors("state of MeZO") as check:
            for field in dataclasses.fields(self):
                mine, theirs = getattr(self, field.name), getattr(saved, field.name)
                with check:
                    if mine != theirs:
                        raise OffloadConfigError(
                            f"The state was saved with {field.name}={_short(theirs)}, and the optimizer has "
                            f"{_short(mine)}: resume with the same, or start without the state."
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
        known: Weights before the first step, and whenever training went on, or something else was seen to have changed them.
        final: That of each weight after the last of ``rows``, where the log was saved with it.
    """

    setup: Setup
    rows: list[Row] = dataclasses.field(default_factory=list)
    known: list[Known] = dataclasses.field(default_factory=list)
    final: tuple[int, ...] | None = None

    # -- in a state dict, and in a file ---------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """``seeds`` and ``gradients`` ``[steps]``, ``rates`` and ``decays`` ``[steps or 1, groups or 1]``, 1 where all are
        the same, ``known_steps`` ``[times]`` and ``known_sums`` ``[times, weights]``, and ``final`` ``[weights]``.
        """
        seeds = [row.seed for row in self.rows]
        gradients = [row.gradient for row in self.rows]
        found = {
            "seeds": torch.tensor(seeds, dtype=torch.int64, device="cpu"),
            "gradients": torch.tensor(gradients, dtype=torch.float64, device="cpu"),
        }
        for name in _TABLES:
            found[name] = _narrow([getattr(row, name) for row in self.rows])
        if self.known:
            found["known_steps"] = torch.tensor([one.steps for one in self.known], dtype=torch.int64, device="cpu")
            found["known_sums"] = torch.tensor([one.sums for one in self.known], dtype=torch.int64, device="cpu")
        if self.final is not None:
            found["final"] = torch.tensor(self.final, dtype=torch.int64, device="cpu")
        return found

    @classmethod
    def from_tensors(cls, setup: Setup, tensors: Mapping[str, Tensor]) -> Self:
        """What :meth:`tensors` gave."""
        seeds, gradients = (tensors[name].tolist() for name in ("seeds", "gradients"))
        tables = [_widen(tensors[name], len(seeds), setup.group_count) for name in _TABLES]
        rows = [Row(*row) for row in zip(seeds, gradients, *tables, strict=True)]
        known: list[Known] = []
        if "known_steps" in tensors:
            times = zip(tensors["known_steps"].tolist(), tensors["known_sums"].tolist(), strict=True)
            known = [Known(steps, tuple(sums)) for steps, sums in times]
        return cls(setup, rows, known, tuple(tensors["final"].tolist()) if "final" in tensors else None)

    def state(self) -> dict[str, Any]:
        """For a state dict of an optimizer, which loads with ``weights_only=True``."""
        text, tensors = self.setup.as_text(), self.tensors()
        return {_KEY: {"setup": text, "digest": _digest(text, tensors), **tensors}}

    @classmethod
    def from_state(cls, state_dict: Mapping[str, Any]) -> Self:
        """Of a state dict. Raises :class:`~hf_offload.errors.OffloadConfigError` if it is another optimizer's, or damaged."""
        own = state_dict.get(_KEY)
        if own is None:
            raise OffloadConfigError(
                "This state was not saved by MeZO: go on with the optimizer that saved it, or start without its state."
            )
        tensors = {key: one for key, one in own.items() if isinstance(one, Tensor)}
        return cls._checked(own.get("setup"), own.get("digest"), tensors, "This state of MeZO")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a safetensors file."""
        from safetensors.torch import save_file

        text, tensors = self.setup.as_text(), self.tensors()
        save_file(tensors, path, {"format": "pt", _KEY: text, "digest": _digest(text, tensors)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """From a file, or from the folder of a checkpoint. Raises :class:`~hf_offload.errors.OffloadConfigError` where there
        is none, or a damaged one.
        """
        from safetensors import SafetensorError, safe_open

        file = Path(path) / LOG_FILE if Path(path).is_dir() else Path(path)
        try:
            with safe_open(file, "pt") as found:
                texts = found.metadata() or {}
                tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118  # not a mapping
        except (OSError, SafetensorError) as error:
            raise OffloadConfigError(
                f"{file} cannot be read as a log of MeZO ({error}): give a {LOG_FILE}, or a checkpoint that has one."
            ) from error
        if _KEY not in texts:
            raise OffloadConfigError(f"{file} is not a log of MeZO: give a {LOG_FILE}, or a checkpoint that has one.")
        return cls._checked(texts[_KEY], texts.get("digest"), tensors, str(file))

    @classmethod
    def _checked(cls, text: str | None, digest: str | None, tensors: Mapping[str, Tensor], what: str) -> Self:
        if text is None or digest != _digest(text, tensors):
            raise OffloadConfigError(
                f"{what} is damaged, or another version of hf_offload has written it: take that of another checkpoint."
            )
        return cls.from_tensors(Setup.from_text(text), tensors)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Of all that a log holds."""
    found = xxhash.xxh3_128(text.encode())
    for name, one in sorted(tensors.items()):
        found.update(f"{name} {one.dtype} {tuple(one.shape)}".encode())
        found.update(one.cpu().contiguous().numpy().data)
    return found.hexdigest()


def _narrow(table: Sequence[Sequence[float]]) -> Tensor:
    width = len(table[0]) if table else 1
    found = torch.tensor(table, dtype=torch.float64, device="cpu").reshape(len(table), width)
    for dim in (0, 1):
        first = found.narrow(dim, 0, min(1, found.shape[dim]))
        if (found == first).all():
            found = first
    return found.contiguous()


def _widen(table: Tensor, count: int, groups: int) -> list[tuple[float, ...]]:
    if not count:
        return []
    return [tuple(row) for row in table.cpu().expand(count, groups).tolist()]
