"""Former names of settings. They work for one version, with a warning that names the new one."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from hf_offload.former_names import FormerName, add_former_name, called_from, check_given_once, warn_renamed

T = TypeVar("T")

RENAMED = {
    # Fields of OffloadConfig: keywords, variables, keys of recipes and of accelerate's section.
    "min_offload_bytes": "min_bytes",
    "at_disk_write_limit": "on_disk_write_limit",
    "disk_rated_bytes": "drive_endurance_bytes",
    "lean_activations": "recompute_elementwise",  # a training argument, too
    # Training arguments.
    "offload_dir": "offload_directory",
    "offload_read_ahead": "offload_read_ahead_bytes",
    "offload_max_disk_write": "offload_max_disk_write_bytes",
    "offload_at_disk_write_limit": "offload_on_disk_write_limit",
    "offload_disk_rated": "offload_drive_endurance_bytes",
    # Classes.
    "LeanConfig": "RecomputeElementwiseConfig",
}
"""Old name -> new one."""


def with_current_names(
    given: Mapping[str, Any],
    known: Collection[str],
    where: str = "",
    shown: Callable[[str], str] = str,
    stacklevel: int = 2,
) -> dict[str, Any]:
    """``given`` with the new names of those of ``known`` that were renamed. In messages, ``shown`` turns a name into its
    spelling in ``where``; ``stacklevel`` is that of the warning, as in :func:`~hf_offload.former_names.warn_renamed`.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if a setting is given by both of its names.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        new = RENAMED.get(name) if isinstance(name, str) and name not in known else None
        if new is None or new not in known:
            found[name] = value
            continue
        said = f"{where}: {shown(name)}" if where else shown(name)
        check_given_once(said, shown(new), new in given)
        warn_renamed(said, shown(new), stacklevel)
        found[new] = value
    return found


def old_names(known: Collection[str]) -> dict[str, str]:
    """Old name -> new one, of those of ``known`` that were renamed."""
    return {old: new for old, new in RENAMED.items() if new in known}


def takes_old_names(cls: type[T]) -> type[T]:
    """The dataclass ``cls``, whose constructor takes old names of its fields, too, and whose instances have them."""
    make: Any = cls.__init__
    known = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    old = old_names(known)

    @functools.wraps(make)
    def init(self: Any, *args: Any, **settings: Any) -> None:
        if called_from(["dataclasses"]):  # by replace(), which adds what is not to change
            settings = {name: value for name, value in settings.items() if name not in map(old.get, settings)}
        make(self, *args, **with_current_names(settings, known, stacklevel=3))

    cls.__init__ = init  # type: ignore[method-assign]
    for former, now in old.items():
        add_former_name(cls, former, FormerName(now))
    return cls
