"""The comment a recipe opens with: how it is launched, for which machine it is meant, and what is predicted there."""

import dataclasses
import re
import shlex
from collections.abc import Mapping

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import nearest

PROGRAM = "hf-offload"
MACHINE = ("gpu", "tflops", "memory_bandwidth", "pcie", "ssd", "ram", "disk")
"""What the plan of a recipe may say beside its name: everything else is in the recipe."""
PREDICTED = "# Predicted on "
_PEAK = re.compile(r"peak ([0-9.]+) GiB")


@dataclasses.dataclass(frozen=True)
class Header:
    """Lines of a recipe's opening comment.

    Attributes:
        plan: The command ``hf-offload plan NAME --gpu CARD ...``, None if there is none.
        predicted: What was written down as its result, None if nothing was.
    """

    plan: str | None
    predicted: str | None

    @property
    def machine(self) -> dict[str, str]:
        """Options of ``hf-offload plan`` that describe the machine: ``{"gpu": "rtx4090", "ssd": "5GB/s"}``.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for options that change what is planned.
        """
        words = shlex.split(self.plan or "")[3:]
        options = dict(zip(words[::2], words[1::2], strict=False))
        known = [f"--{name.replace('_', '-')}" for name in MACHINE]
        for option in options:
            if option not in known:
                raise OffloadConfigError(
                    f"{self.plan!r}: {option!r} does not describe the machine.{nearest(option, known)} What is planned is "
                    "said in the recipe."
                )
        if len(words) % 2 or "--gpu" not in options:
            raise OffloadConfigError(f"{self.plan!r} describes no machine: add --gpu rtx4090 or another card.")
        return {option[2:].replace("-", "_"): value for option, value in options.items()}

    @property
    def card(self) -> str:
        """The card the recipe is meant for, or an empty string."""
        return self.machine["gpu"] if self.plan is not None else ""

    @property
    def peak(self) -> str:
        """The predicted peak as it is written, or an empty string."""
        found = _PEAK.search(self.predicted or "")
        return f"{found[1]} GiB" if found else ""


def read_header(text: str) -> Header:
    """The opening comment of a recipe's ``text``."""
    comment = _comment(text)
    plan = next((line[2:] for line in comment if line.startswith(f"# {PROGRAM} plan ")), None)
    return Header(plan, next((line for line in comment if line.startswith(PREDICTED)), None))


def with_prediction(text: str, predicted: str) -> str:
    """``text`` with the line that says what is predicted, in the place of the old one or below the launch lines."""
    lines = text.splitlines(keepends=True)
    end = len(_comment(text))
    old = next((number for number, line in enumerate(lines[:end]) if line.startswith(PREDICTED)), None)
    if old is not None:
        lines[old] = predicted + "\n"
    else:
        at = next((n for n, line in enumerate(lines[:end]) if not line.startswith(f"# {PROGRAM} ")), end)
        lines[at:at] = ["#\n", predicted + "\n"]
    return "".join(lines)


def renamed(text: str, names: Mapping[str, str]) -> str:
    """``text`` whose launch lines name the recipe otherwise: old name -> new name."""
    lines = text.splitlines(keepends=True)
    for old, new in names.items():
        launch = re.compile(rf"({PROGRAM} (?:train|plan|recipes \w+)|-m hf_offload train) {re.escape(old)}(?=\s|$)")
        word = shlex.quote(new).replace("\\", "\\\\")
        for number in range(len(_comment(text))):
            lines[number] = launch.sub(rf"\1 {word}", lines[number])
    return "".join(lines)


def _comment(text: str) -> list[str]:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line)
    return lines
