"""Options of ``hf-offload plan`` that have become commands or have another name: they work for one version."""

from collections.abc import Callable, Sequence

from hf_offload.former_names import check_given_once
from hf_offload.settings.schema import TILED

_COMMANDS = {"--levers": "levers", "--modes": "modes", "--order": "order"}
_RENAMED = {"--budget": "--memory-budget", "--lean": "--recompute-elementwise", "--cards": "--gpus"}
_WITHOUT_VALUE = ("--tiled-loss", "--tiled-mlp")


def with_current_options(words: Sequence[str], default: str, warn: Callable[[str], object]) -> list[str]:
    """The arguments ``words`` of ``hf-offload plan`` with a command in front (``default``, or the one that an option stood
    for) and with the current names of options. ``warn`` gets a line for each change.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for an option that is given by both of its names.
    """
    former = next((word for word in words if word in _COMMANDS), None)
    command = default if former is None else _COMMANDS[former]
    if former is not None:
        warn(
            f"{former} is the command `hf-offload plan {command}` now; the option will be removed in the next version."
        )
    words = [word for word in words if word != former]
    given = {word.partition("=")[0] for word in words}
    found = [command]
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        name, equals, value = word.partition("=")
        if name in _RENAMED:
            check_given_once(name, _RENAMED[name], _RENAMED[name] in given)
            warn(f"{name} is called {_RENAMED[name]} now; the old name will be removed in the next version.")
        found.append(f"{_RENAMED.get(name, name)}{equals}{value}")
        if word in _WITHOUT_VALUE and (following.startswith("-") or "=" in following):
            warn(f"{word} takes a value now: {', '.join(TILED)}.")
            found.append("on")
    return found
