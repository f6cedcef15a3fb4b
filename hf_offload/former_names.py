"""Public names that have changed: the former ones work for one version, with a warning that names the new one.

Names of settings are in :mod:`hf_offload.settings.renamed`.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

from hf_offload.errors import OffloadConfigError

P = ParamSpec("P")
R = TypeVar("R")


def warn_renamed(former: str, now: str, stacklevel: int = 2) -> None:
    """Warn that ``former`` is called ``now``; with ``stacklevel`` 2, at the line that called the caller."""
    warnings.warn(
        f"{former} is called {now} now; the old name will be removed in the next version.",
        FutureWarning,
        stacklevel + 1,
    )


def called_from(modules: Collection[str], stacklevel: int = 2) -> bool:
    """Whether code of one of ``modules`` called the caller; with another ``stacklevel``, as in :func:`warn_renamed`."""
    return sys._getframe(stacklevel).f_globals.get("__name__") in modules


def check_given_once(former: str, now: str, given: bool) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` if ``now`` is ``given`` as well."""
    if given:
        raise OffloadConfigError(f"{former} is the old name of {now}, which is given as well: drop it.")


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take arguments by their former names, too: ``former="now"``.

    It then raises :class:`~hf_offload.errors.OffloadConfigError` if it is called with both.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for former, now in names.items():
                if former in kwargs:
                    said = f"{function.__name__}({former}=)"
                    check_given_once(said, f"{now}=", now in kwargs)
                    warn_renamed(said, f"{now}=")
                    kwargs[now] = kwargs.pop(former)
            return function(*args, **kwargs)

        return call

    return decorate


class FormerName:
    """An attribute that has another name now."""

    def __init__(self, now: str):
        self._now = now
        self._former = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._former = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warn_renamed(self._former, self._now)
        return getattr(instance, self._now)

    def __set__(self, instance: object, value: Any) -> None:
        warn_renamed(self._former, self._now)
        setattr(instance, self._now, value)


def add_former_name(cls: type, former: str, attribute: FormerName) -> None:
    """Give ``cls`` the ``attribute`` by its name ``former``, as if it stood in the body of the class."""
    attribute.__set_name__(cls, former)
    setattr(cls, former, attribute)
