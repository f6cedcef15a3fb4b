"""Sizes in bytes, as people write them: ``20GiB``, ``512 MB``, ``1e9``."""

import math
import re

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.shown import shown

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = _UNITS[_letter] = 1024**_power

_SIZE = re.compile(r"\s*(-?[0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


LARGEST = 2**63 - 1
"""Most that a size or a count may be: what systems count in."""


def parse_bytes(value: int | float | str, name: str = "size") -> int:
    """Turn ``"20GiB"`` (or a plain number of bytes) into an ``int``.

    ``KiB``/``K`` count in 1024s, ``KB`` in 1000s. Raises :class:`OffloadConfigError` that names the setting ``name``.
    """
    size: int | float
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise OffloadConfigError(
            f"{name}={shown(value)} is not a size: give a number of bytes or text such as '20GiB'."
        )
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise OffloadConfigError(
                f"{name}={shown(value)} is not a size: write it as '20GiB', '500MB' or a number of bytes."
            )
        size = float(match[1]) * _UNITS[match[2].lower()]
        if _UNITS[match[2].lower()] == 1 and math.isfinite(size) and not size.is_integer():
            raise OffloadConfigError(
                f"{name}={shown(value)} is not a whole number of bytes: is a unit missing, as in '20GiB'?"
            )
    elif isinstance(value, float) and (math.isnan(value) or (math.isfinite(value) and not value.is_integer())):
        raise OffloadConfigError(
            f"{name}={value!r} is not a size: give a whole number of bytes or text such as '20GiB'."
        )
    else:
        size = value
    if size < 0:
        raise OffloadConfigError(f"{name}={shown(value)} is negative: give a size of zero bytes or more.")
    if not size <= LARGEST:
        raise OffloadConfigError(f"{name}={shown(value)} is more than any device has: give less than 8 EiB.")
    return round(size)


def format_bytes(size: float) -> str:
    """``format_bytes(3 * 2**30) == "3.00 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """``format_seconds(0.0722) == "72.2 ms"``."""
    return f"{seconds:.3g} s" if seconds == 0 or seconds >= 1 else f"{seconds * 1e3:.3g} ms"
