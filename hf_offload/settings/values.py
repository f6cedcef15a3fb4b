"""The types of settings: pydantic's own, strict, and :class:`Reader` for what people write in several ways."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, Strict, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import core_schema

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import from_mapping, in_section
from hf_offload.settings.load import choose
from hf_offload.settings.shown import cropped, shown
from hf_offload.settings.sizes import LARGEST, parse_bytes


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a NUL character")
    return value


def _as_written(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    found = check(value)
    return value if isinstance(value, int) else found


Whole = Annotated[int, Strict(), Field(le=LARGEST)]
"""A whole number, by default as fits into 64 bits."""
Number = Annotated[float, Strict(), Field(allow_inf_nan=False), WrapValidator(_as_written)]
"""A finite number; a whole one stays whole."""
Flag = Annotated[bool, Strict()]
"""True or false."""
Text = Annotated[str, Strict(), Field(min_length=1), AfterValidator(_without_nul)]
"""Text, without NUL characters."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """A type of settings that people write in several ways: ``Annotated[int | str | None, size()]``. ``None`` stays where the
    annotation says so.

    Attributes:
        read: Returns the setting from its name and any object, or raises :class:`~hf_offload.errors.OffloadConfigError`.
        schema: What may be written, in JSON schema.
        section: The settings class of a mapping.
    """

    read: Callable[[str, Any], Any]
    schema: Mapping[str, Any]
    section: type[Any] | None = None

    def __call__(self, name: str, value: Any) -> Any:
        return self.read(name, value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def read(value: Any, info: core_schema.ValidationInfo) -> Any:
            return self.read((info.context or str)(str(info.field_name)), value)

        found = core_schema.with_info_plain_validator_function(read)
        return core_schema.nullable_schema(found) if type(None) in get_args(source) else found

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return dict(self.schema)


def one_of(allowed: Iterable[Any], aliases: Mapping[str, str] | None = None, *, on_off: bool = False) -> Reader:
    """One of some words or numbers; with ``on_off``, true and false stand for "on" and "off", as YAML 1.1 reads them
    unquoted.
    """
    allowed, aliases = tuple(allowed), aliases or {}

    def read(name: str, value: Any) -> Any:
        if on_off and isinstance(value, bool):
            value = "on" if value else "off"
        if isinstance(value, str):
            value = aliases.get(value, value)
        choose(name, value, allowed, aliases)
        return value

    kind = "string" if isinstance(allowed[0], str) else "integer"
    return Reader(read, {"type": [kind, "boolean"] if on_off else kind, "enum": list(allowed)})


def size(*, at_least: int = 0) -> Reader:
    """A number of bytes, or text such as ``"20GiB"``."""

    def read(name: str, value: Any) -> int:
        found = parse_bytes(value, name)
        if found < at_least:
            raise OffloadConfigError(f"{name}={shown(value)} is too small: give {at_least} or more, or leave it out.")
        return found

    return Reader(read, {"type": ["string", "integer"], "minimum": at_least, "unit": "bytes"})


def names(what: str, *, alone: Iterable[str] = (), or_none: bool = False) -> Reader:
    """Words, as a list or separated by commas; one of the words ``alone`` stays by itself. ``or_none``: or an empty list."""
    alone = tuple(alone)

    def read(name: str, value: Any) -> str | tuple[str, ...]:
        if isinstance(value, str) and value in alone:
            return value
        parts = value.split(",") if isinstance(value, str) else value
        found = tuple(part.strip() for part in items(parts) if isinstance(part, str) and part.strip())
        if len(found) != len(items(parts)) or not (found or (or_none and isinstance(value, (list, tuple)))):
            said = f", and none of {', '.join(alone)}" if alone else ""
            raise OffloadConfigError(f"{name}={shown(value)} is not a list of {what}{said}.")
        return tuple(_checked_text(name, part) for part in found)

    return Reader(read, {"type": ["string", "array"], "items": {"type": "string"}})


def path_text() -> Reader:
    """A path, as text."""

    def read(name: str, value: Any) -> str:
        found = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(found, str) or not found:
            raise OffloadConfigError(f"{name}={shown(value)} is not text.")
        expand(name, found)
        return found

    return Reader(read, {"type": "string", "format": "path"})


def patterns() -> Reader:
    """One path or several, not yet looked up."""

    def read(name: str, value: Any) -> tuple[str, ...]:
        parts = [value] if isinstance(value, str) else items(value)
        if not parts or not all(isinstance(part, str) and part for part in parts):
            raise OffloadConfigError(f"{name}={shown(value)} is neither a path nor a list of paths.")
        for part in parts:
            expand(name, part)
        return tuple(_checked_text(name, part) for part in parts)

    return Reader(read, {"type": ["string", "array"], "items": {"type": "string"}})


def folders() -> Reader:
    """One directory or several, as paths; empty text stands for none."""

    def read(name: str, value: Any) -> tuple[Path, ...] | None:
        if isinstance(value, str) and not value:
            return None
        parts = [value] if isinstance(value, (str, os.PathLike)) else items(value)
        if not parts:
            raise OffloadConfigError(f"{name}={shown(value)} is neither a path nor a list of paths.")
        paths = tuple(expand(name, part) for part in parts)
        if len(set(paths)) != len(paths):
            raise OffloadConfigError(f"{name}={shown(', '.join(map(str, paths)))} names the same path twice.")
        return paths

    return Reader(read, {"type": ["string", "array"], "items": {"type": "string"}, "format": "paths"})


def mapping(what: str) -> Reader:
    """A mapping whose keys are text."""

    def read(name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise OffloadConfigError(f"{name}={shown(value)} is not a mapping{what and ' '}{what}.")
        return value

    return Reader(read, {"type": "object"})


def section(cls: type[Any], what: str = "", *, short: str | None = None) -> Reader:
    """A mapping that is read as settings of ``cls``; with ``short``, text alone stands for that one of them."""

    def read(name: str, value: Any) -> Any:
        if isinstance(value, cls):
            return value
        values = {short: value} if short is not None and isinstance(value, str) else value
        if not isinstance(values, Mapping):
            raise OffloadConfigError(f"{name}={shown(value)} is not a mapping{what and ' '}{what}.")
        return from_mapping(cls, values, name, in_section(name))

    return Reader(read, {"type": ["string", "object"] if short is not None else "object"}, cls)


def items(value: Any) -> list[Any]:
    """The items of a list, tuple or the like; none of anything else."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)) else []


def expand(name: str, value: Any) -> Path:
    """A path, with ``~`` expanded. Raises :class:`OffloadConfigError` for what cannot be one."""
    raw = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(raw, str) or not raw:
        raise OffloadConfigError(f"{name}={shown(value)} is not a path.")
    try:
        return Path(_checked_text(name, raw)).expanduser()
    except RuntimeError as error:
        raise OffloadConfigError(f"{name}={shown(raw)}: {cropped(str(error))}: write the path out.") from error


def _checked_text(name: str, value: str) -> str:
    if "\0" in value:
        raise OffloadConfigError(f"{name}={shown(value)} holds a NUL character.")
    return value
