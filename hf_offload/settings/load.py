"""Turning words into settings: every mistake in one message, each with the nearest valid name."""

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from hf_offload.errors import OffloadConfigError

T = TypeVar("T")


def nearest(word: object, names: Iterable[str]) -> str:
    """``" Did you mean 'ssd'?"`` or an empty string."""
    names, word = list(names), str(word)
    begun = [name for name in names if word and name.startswith(word)]
    found = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f" Did you mean {found[0]!r}?" if found else ""


def choose(name: str, value: object, allowed: Iterable[str], aliases: Iterable[str] = ()) -> None:
    """Raise :class:`OffloadConfigError` unless ``value`` is one of ``allowed``."""
    allowed = list(allowed)
    if value not in allowed:
        raise OffloadConfigError(
            f"{name}={value!r} is unknown: choose one of {', '.join(allowed)}.{nearest(value, [*allowed, *aliases])}"
        )


class collect_errors(contextlib.AbstractContextManager["_Check"]):
    """Collect every :class:`OffloadConfigError` raised under ``with check:`` and raise them as one at the end."""

    def __init__(self, what: str):
        self._what = what
        self._errors: list[str] = []

    def __enter__(self) -> "_Check":
        return _Check(self._errors)

    def __exit__(self, exc_type: object, exc: object, tb: object) -> None:
        if exc_type is None and self._errors:
            if len(self._errors) == 1:
                raise OffloadConfigError(self._errors[0])
            lines = "\n".join(f"  - {error}" for error in self._errors)
            error = OffloadConfigError(f"{len(self._errors)} mistakes in the {self._what}:\n{lines}")
            error.problems = tuple(self._errors)
            raise error


class _Check:
    def __init__(self, errors: list[str]):
        self._errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: type | None, exc: BaseException | None, tb: object) -> bool:
        if isinstance(exc, OffloadConfigError):
            self._errors.extend(exc.problems or (str(exc),))
            return True
        return False


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build the dataclass ``cls`` from ``values``; unknown keys and wrong values are reported together."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    with collect_errors(where) as check:
        for key in values:
            with check:
                if key not in names:
                    raise OffloadConfigError(
                        f"{where}: unknown key {key!r}.{nearest(key, names)} Known: {', '.join(names)}."
                    )
        with check:
            return_value = cls(**{key: value for key, value in values.items() if key in names})
    return return_value


def check_text(section: str, name: str, value: object) -> None:
    """Raise :class:`OffloadConfigError` unless ``value`` is text that is not empty, or ``None``."""
    if value is not None and (not isinstance(value, str) or not value):
        raise OffloadConfigError(f"{section}.{name}={value!r} is not text.")


def check_whole(name: str, value: object, at_least: int) -> None:
    """Raise :class:`OffloadConfigError` unless ``value`` is a whole number of that size."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise OffloadConfigError(f"{name}={value!r} is not a whole number.")
    if value < at_least:
        raise OffloadConfigError(f"{name}={value} is too small: give {at_least} or more.")
