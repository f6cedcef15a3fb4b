"""Collecting errors: all of them in one message, each with its source and the nearest valid name."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.shown import listed, nearest, shown

__all__ = ["choose", "collect_errors", "from_mapping", "names_of", "naming", "nearest"]

T = TypeVar("T")
_names: ContextVar[tuple[type | None, Mapping[str, str]]] = ContextVar("names", default=(None, {}))


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


@contextlib.contextmanager
def naming(cls: type, names: Mapping[str, str]) -> Iterator[None]:
    """Errors of ``cls(...)`` call its settings by the names they have where they were given: field -> name there."""
    token = _names.set((cls, names))
    try:
        yield
    finally:
        _names.reset(token)


def names_of(cls: type) -> Mapping[str, str]:
    """The names of :func:`naming` that hold for ``cls`` now."""
    of, names = _names.get()
    return names if of is cls else {}


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    """Problems that do not say where they are begin with ``where``."""
    try:
        yield
    except OffloadConfigError as error:
        problems = error.problems or (str(error),)
        found = [problem if problem.startswith(where) else f"{where}: {problem}" for problem in problems]
        raise joined(where, found) from None


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build the dataclass ``cls`` from ``values``; unknown keys and wrong values are reported together, with ``where``."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    with collect_errors(where) as check:
        for key in values:
            with check:
                if key not in names:
                    raise OffloadConfigError(
                        f"{where}: unknown key {shown(key)}.{nearest(key, names)} Known: {listed(names, key)}."
                    )
        with check, _located(where):
            return_value = cls(**{key: value for key, value in values.items() if key in names})
    return return_value
