"""Options that hold several values, with commas between."""

from hf_offload.errors import OffloadConfigError


def names_of(text: str) -> list[str]:
    """The words of ``text``."""
    return [name.strip() for name in text.split(",") if name.strip()]


def seeds_of(text: str) -> list[int]:
    """The whole numbers of ``--seeds``. Raises :class:`~hf_offload.errors.OffloadConfigError`."""
    try:
        return [int(name) for name in names_of(text)]
    except ValueError as error:
        raise OffloadConfigError(f"--seeds {text!r}: give whole numbers with commas between, such as 0,1,2.") from error


def rates_of(text: str) -> list[float]:
    """The numbers of ``--rates``. Raises :class:`~hf_offload.errors.OffloadConfigError`."""
    try:
        return [float(name) for name in names_of(text)]
    except ValueError as error:
        raise OffloadConfigError(f"--rates {text!r}: give numbers with commas between, such as 0.001,0.01.") from error
