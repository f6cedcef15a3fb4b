"""Which options of ``hf-offload plan`` go together, found out before anything slow is imported."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.plan.hardware import Hardware, describe_hardware

_SILENT = {
    "--levers": ("--plot", "--timeline", "--budget", "--order", "--modes", "--gpu", "--directory"),
    "--modes": ("--plot", "--timeline", "--order"),
    "--order": ("--plot", "--budget"),
}
"""Tables that are shown instead of a plan -> options that say nothing to them."""


def described_machines(
    table: str | None,
    gpu: str | None,
    cards: str,
    described: dict[str, Any],
    directory: list[Path] | None,
    measure: bool,
) -> list[Hardware]:
    """The machines that are described; none if it is this one.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a wrong description, or one of no machine.
    """
    if table == "--levers":
        described = {name: value for name, value in described.items() if name != "memory_bandwidth"}
        return [describe_hardware(card.strip(), **described) for card in cards.split(",")]
    if gpu is None:
        given = [f"--{name.replace('_', '-')}" for name, value in described.items() if value is not None]
        if given:
            raise OffloadConfigError(f"{', '.join(given)} describe another machine: add --gpu.")
        return []
    if directory or measure:
        raise OffloadConfigError("--directory and --measure are for this machine: leave out --gpu.")
    return [describe_hardware(gpu, **described)]


def refuse_silent_options(table: str | None, options: Mapping[str, object]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for ``options`` that say nothing to ``table``."""
    given = [name for name in _SILENT.get(table or "", ()) if options[name]]
    if given:
        hint = ", which has --cards" if table == "--levers" else ""
        raise OffloadConfigError(f"{', '.join(given)} does not go with {table}{hint}: leave it out.")
