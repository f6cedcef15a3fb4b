"""Public names that have changed: the former ones work for one version, with a warning that says the new one."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function take arguments by their former names, too: ``former="now"``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for former, now in names.items():
                if former in kwargs:
                    _warn(f"{function.__name__}({former}=)", f"{now}=", stacklevel=4)
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
        _warn(self._former, self._now, stacklevel=4)
        return getattr(instance, self._now)


def _warn(former: str, now: str, stacklevel: int) -> None:
    warnings.warn(f"{former} has been renamed: use {now}.", FutureWarning, stacklevel=stacklevel - 1)
