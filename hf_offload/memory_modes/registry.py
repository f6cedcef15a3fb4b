"""From a name and settings to a memory mode."""

from collections.abc import Sequence
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.memory_modes.protocol import MemoryMode
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.memory_modes import MODES, NONE, mode_class, mode_names, read_mode_settings
from hf_offload.settings.schema import Directory
from hf_offload.settings.shown import shown


def memory_mode(name: str, settings: Any = None, directories: Sequence[Directory] = ()) -> MemoryMode | None:
    """The mode ``name`` with ``settings``, a mapping or its JSON text; None for ``"none"``. State that goes to disk goes to
    ``directories``, if the settings name none.

    Example, for a loop of your own::

        mode = memory_mode("galore", {"rank": 128})
        model = mode.prepare(model)
        optimizer = mode.optimizer(model, lr=1e-4, weight_decay=0.01)

    Raises :class:`~hf_offload.errors.OffloadConfigError` that lists all mistakes.
    """
    choose("memory_mode", name, mode_names())
    values = read_mode_settings(settings)
    if name == NONE:
        if values:
            raise OffloadConfigError(
                f"memory_mode_kwargs={shown(settings)} is given, but memory_mode is 'none': choose one of "
                f"{', '.join(MODES)}."
            )
        return None
    mode = mode_class(name)
    known = mode.setting_names()
    with collect_errors(f"settings of memory_mode={name!r}") as check:
        for key in [key for key in values if key not in known]:
            with check:
                others = [other for other in MODES if key in mode_class(other).setting_names()]
                raise OffloadConfigError(
                    f"memory_mode={name!r} has no setting {shown(key)}"
                    + (f" (it is one of {', '.join(others)})" if others else "")
                    + f". It has: {', '.join(known) or 'none'}."
                )
        with check:
            given = {key: value for key, value in values.items() if key in known}
            found = mode.from_settings({**MODES[name].defaults, **given}, f"memory_mode={name!r}", directories)
    return found
