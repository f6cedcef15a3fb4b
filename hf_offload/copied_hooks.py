"""Hooks that survive copying and pickling of what they are registered on, and do nothing in the copy."""

from collections.abc import Callable
from typing import Any


class InertInCopies:
    """Calls ``call``; a copy of it, deep or pickled, calls nothing.

    A model is copied with its hooks. They belong to the session of the model that was copied: in the copy they would
    measure, offload and unwind on that one's behalf, and what they hold often cannot be pickled.
    """

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[..., Any] | None = None):
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[type["InertInCopies"], tuple[()]]:
        return InertInCopies, ()
