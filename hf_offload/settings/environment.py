"""Settings as environment variables, the way they reach processes that a launcher starts: ``HF_OFFLOAD_TIER=ssd``.

Every field of :class:`~hf_offload.OffloadConfig` has one, named ``HF_OFFLOAD_`` and the field in capitals. Sizes are
written as everywhere (``20GiB``); several directories or modules are separated by commas. An empty variable counts as
not set.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import forms, from_mapping
from hf_offload.settings.load import choose, collect_errors
from hf_offload.settings.schema import FIELDS, OffloadConfig
from hf_offload.settings.shown import cropped, nearest, shown

logger = logging.getLogger(__name__)

PREFIX = "HF_OFFLOAD_"
FORMS = forms(OffloadConfig)

AUTOLOAD_VARIABLE = f"{PREFIX}AUTOLOAD"
DISABLE_VARIABLE = f"{PREFIX}DISABLE"
PARENT_VARIABLE = f"{PREFIX}PARENT"
ALLOCATOR_VARIABLE = f"{PREFIX}ALLOCATOR"
RESUME_VARIABLE = f"{PREFIX}RESUME"
ALLOCATORS = ("auto", "tcmalloc", "mimalloc", "glibc-tuned", "glibc")
SWITCHES = (AUTOLOAD_VARIABLE, DISABLE_VARIABLE)
# Variables of the package that are no settings of a run.
_OTHERS = (*SWITCHES, PARENT_VARIABLE, ALLOCATOR_VARIABLE, RESUME_VARIABLE)


def variable(field: str) -> str:
    """``variable("tier") == "HF_OFFLOAD_TIER"``."""
    return PREFIX + field.upper()


def is_on(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the switch ``name`` is on: 1, true, yes or on; or off: 0, false, no, off, or not there.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for anything else.
    """
    value = (os.environ if environ is None else environ).get(name, "")
    if value.strip().lower() in ("1", "true", "yes", "on"):
        return True
    if value.strip().lower() in ("", "0", "false", "no", "off"):
        return False
    raise OffloadConfigError(f"{name}={shown(value)} is neither on nor off: set it to 1 or 0, or leave it out.")


def settings_from(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings that are given as variables, by field; those that are not are not in it.

    Raises :class:`~hf_offload.errors.OffloadConfigError` as :func:`check_variables` does.
    """
    environ = os.environ if environ is None else environ
    check_variables(environ)
    return _values(environ)


def check_variables(environ: Mapping[str, str] | None = None) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for unknown variables that begin with ``HF_OFFLOAD_``, and for
    wrong values of those that are not settings.
    """
    environ = os.environ if environ is None else environ
    known = [variable(field) for field in FIELDS]
    with collect_errors("environment") as check:
        for name in sorted(environ):
            with check:
                if name.startswith(PREFIX) and name not in (*_OTHERS, *known):
                    raise OffloadConfigError(f"The variable {cropped(name)} is not a setting.{nearest(name, known)}")
        for name in SWITCHES:
            with check:
                is_on(name, environ)
        with check:
            if environ.get(ALLOCATOR_VARIABLE):
                choose(ALLOCATOR_VARIABLE, environ[ALLOCATOR_VARIABLE], ALLOCATORS)


def unless_disabled(config: OffloadConfig) -> OffloadConfig:
    """``config``, or with ``HF_OFFLOAD_DISABLE`` only its memory mode.

    Raises :class:`~hf_offload.errors.OffloadConfigError` as :func:`check_variables` does.
    """
    check_variables()  # a misspelt switch would go unnoticed
    if is_on(DISABLE_VARIABLE):
        logger.warning("%s is set: nothing is offloaded.", DISABLE_VARIABLE)
        return OffloadConfig(tier="none", memory_mode=config.memory_mode, memory_mode_kwargs=config.memory_mode_kwargs)
    return config


def settings_with(
    given: Mapping[str, Any], where: str, environ: Mapping[str, str] | None = None, *, environment_first: bool = False
) -> tuple[OffloadConfig, dict[str, Any]]:
    """``given``, which comes from ``where``, merged with the environment's settings, and the latter alone. ``given`` takes
    precedence, or with ``environment_first`` the environment.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for all errors of what takes effect.
    """
    environ = os.environ if environ is None else environ
    found = _values(environ)
    merged = {**given, **found} if environment_first else {**found, **given}
    of_environment = {field: variable(field) for field in found if environment_first or field not in given}
    with collect_errors(f"{where} and the environment" if found else where) as check:
        with check:
            check_variables(environ)
        with check:
            config = from_mapping(OffloadConfig, merged, where, lambda field: of_environment.get(field, field))
            config.mode()  # raises for wrong settings of the mode
    return config, found


def variables_for(settings: Mapping[str, Any]) -> dict[str, str]:
    """The variables that :func:`settings_from` reads back as ``settings``; ``None`` is left out."""
    return {
        variable(field): FORMS[field].to_text(field, value) for field, value in settings.items() if value is not None
    }


def _values(environ: Mapping[str, str]) -> dict[str, Any]:
    texts = {field: environ.get(variable(field), "").strip() for field in FIELDS}
    return {field: FORMS[field].from_text(text) for field, text in texts.items() if text}
