"""Collecting errors: all of them in one message, each with its source and the nearest valid name."""

import contextlib
from collections.abc import Iterable
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.shown import listed, nearest, shown

__all__ = ["choose", "collect_errors", "joined", "nearest", "refuse"]


def choose(name: str, value: object, allowed: Iterable[Any], aliases: Iterable[str] = ()) -> None:
    """Raise :class:`OffloadConfigError` unless ``value`` is one of ``allowed``, and of its type."""
    allowed = list(allowed)
    if not any(isinstance(value, type(one)) and value == one for one in allowed):
        raise OffloadConfigError(
            f"{name}={shown(value)} is unknown: choose one of {listed(map(str, allowed), value)}."
            f"{nearest(value, [*map(str, allowed), *aliases]) if isinstance(value, str) else ''}"
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
            raise joined(self._what, self._errors)


class _Check:
    def __init__(self, errors: list[str]):
        self._errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: type | None, exc: BaseException | None, tb: object) -> bool:
        if isinstance(exc, OffloadConfigError):
            new = exc.problems or (str(exc),)
            self._errors.extend(problem for problem in new if problem not in self._errors)
            return True
        return False


def joined(what: str, problems: Iterable[str]) -> OffloadConfigError:
    """One error for all ``problems`` in ``what``."""
    problems = tuple(problems)
    if len(problems) == 1:
        return OffloadConfigError(problems[0])
    lines = "\n".join(f"  - {problem}" for problem in problems)
    error = OffloadConfigError(f"{len(problems)} errors in the {what}:\n{lines}")
    error.problems = problems
    return error


def refuse(what: str, conflicts: Iterable[str]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for all ``conflicts`` of settings with each other, if any."""
    found: list[str] = []
    try:
        found.extend(conflicts)
    except OffloadConfigError as error:  # of other settings that were looked at
        found.extend(error.problems or (str(error),))
    if found:
        raise joined(what, found)
