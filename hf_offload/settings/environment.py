"""Settings as environment variables, the way they reach processes that a launcher starts: ``HF_OFFLOAD_TIER=ssd``.

Every field of :class:`~hf_offload.OffloadConfig` has one, named ``HF_OFFLOAD_`` and the field in capitals. Sizes are
written as everywhere (``20GiB``); several directories or modules are separated by commas. An empty variable counts as
not set.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.lean import LeanConfig
from hf_offload.settings.load import collect_errors, nearest
from hf_offload.settings.sampling import sampled_linear
from hf_offload.settings.schema import OffloadConfig

PREFIX = "HF_OFFLOAD_"
FIELDS = tuple(field.name for field in dataclasses.fields(OffloadConfig))

AUTOLOAD_VARIABLE = f"{PREFIX}AUTOLOAD"
DISABLE_VARIABLE = f"{PREFIX}DISABLE"
PARENT_VARIABLE = f"{PREFIX}PARENT"
# Variables of the package that are no settings of a run.
_OTHERS = (AUTOLOAD_VARIABLE, DISABLE_VARIABLE, PARENT_VARIABLE, f"{PREFIX}ALLOCATOR")


def variable(field: str) -> str:
    """``variable("tier") == "HF_OFFLOAD_TIER"``."""
    return PREFIX + field.upper()


def is_on(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the switch ``name`` is on: 1, true, yes or on."""
    return (os.environ if environ is None else environ).get(name, "").lower() in ("1", "true", "yes", "on")


def settings_from(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings that are given as variables, by field; those that are not are not in it.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a variable that looks like ours and is none.
    """
    environ = os.environ if environ is None else environ
    known = {variable(field): field for field in FIELDS}
    values: dict[str, Any] = {}
    with collect_errors("environment") as check:
        for name in sorted(environ):
            if not name.startswith(PREFIX) or name in _OTHERS:
                continue
            with check:
                if name not in known:
                    raise OffloadConfigError(f"The variable {name} is no setting.{nearest(name, known)}")
                if environ[name].strip():
                    values[known[name]] = _value(known[name], environ[name].strip())
    return values


def variables_for(settings: Mapping[str, Any]) -> dict[str, str]:
    """The variables that :func:`settings_from` reads back as ``settings``; ``None`` is left out."""
    return {variable(field): _text(field, value) for field, value in settings.items() if value is not None}


def _value(field: str, text: str) -> Any:
    if field == "directory":
        return [part.strip() for part in text.split(",") if part.strip()]
    if field == "keep_last_count":
        try:
            return int(text)
        except ValueError:
            raise OffloadConfigError(f"{variable(field)}={text!r} is not a whole number of blocks.") from None
    return text


def _text(field: str, value: Any) -> str:
    if field == "sampled_linear" and not isinstance(value, str):
        sampling = sampled_linear(value)
        return json.dumps(None if sampling is None else dataclasses.asdict(sampling))
    if isinstance(value, LeanConfig):
        return str(value)
    if isinstance(value, bool):  # what YAML makes of an unquoted on
        return "on" if value else "off"
    parts = [value] if isinstance(value, (str, int, float, os.PathLike)) else list(value)
    texts = [str(part) for part in parts]
    if len(texts) > 1 or field == "directory":
        for text in texts:
            if "," in text or text != text.strip():
                raise OffloadConfigError(
                    f"{field}: {text!r} cannot be handed on as a variable: a name must not hold a comma, or begin or end "
                    "with a space."
                )
    return ",".join(texts)
