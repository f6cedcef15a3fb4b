"""The one place where a value of any kind becomes a setting.

A field of a settings class is declared with :func:`setting`, which says how it is read; :func:`read_fields`, in the class's
``__post_init__``, reads them all. A :class:`Reader` takes a setting's name and any object, and returns the setting or raises
:class:`~hf_offload.errors.OffloadConfigError`, and nothing else.
"""

import contextlib
import dataclasses
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import choose, collect_errors, from_mapping, names_of
from hf_offload.settings.shown import cropped, shown
from hf_offload.settings.sizes import LARGEST, parse_bytes

T = TypeVar("T")

NEVER, SCALAR, ALWAYS = "never", "scalar", "always"


@dataclasses.dataclass(frozen=True)
class Reader:
    """How a setting is read.

    Attributes:
        read: From its name and a raw value.
        as_text: Whether what stands on a command line is the text itself and no YAML: :data:`ALWAYS`, :data:`NEVER`, or for a
            :data:`SCALAR`, where a list or a mapping may stand too.
        kind: The type of the value where it is not read from text.
        unit: What a number counts, such as ``"bytes"``.
        splits: Whether commas separate values in a text that came from a variable or an argument.
        choices: The words to choose from, where it is one of some.
    """

    read: Callable[[str, Any], Any]
    as_text: str = NEVER
    kind: type = str
    unit: str = ""
    splits: bool = False
    choices: tuple[str, ...] = ()

    def __call__(self, name: str, value: Any) -> Any:
        return self.read(name, value)

    def from_text(self, text: str) -> Any:
        """The value of a variable or an argument. Wrong text is returned as it is: :attr:`read` refuses it."""
        if self.splits:
            return [part.strip() for part in text.split(",") if part.strip()] if text.strip() else None
        if self.kind is bool:
            return {"true": True, "on": True, "false": False, "off": False}.get(text.strip().lower(), text)
        if self.kind is not str:
            with contextlib.suppress(ValueError):
                return self.kind(text)
        return text

    def to_text(self, name: str, value: Any) -> str:
        """The text that :meth:`from_text` and :attr:`read` understand as ``value``, which is none of ``None``."""
        if isinstance(value, bool):  # what YAML makes of an unquoted on
            return "on" if value else "off"
        if isinstance(value, Mapping):
            return json.dumps(value)
        if isinstance(value, (str, int, float, os.PathLike)) or not isinstance(value, Iterable):
            parts = [str(value)]
        else:
            parts = [str(part) for part in value]
        if self.splits or len(parts) > 1:
            for part in parts:
                if "," in part or part != part.strip():
                    raise OffloadConfigError(
                        f"{name}: {shown(part)} cannot be handed on as a variable: a name must not hold a comma, or begin "
                        "or end with a space."
                    )
        return ",".join(parts)


MOVING, DRIVES, MODEL = "moving", "drives", "model"
"""What a setting is about: moving tensors, the files on drives that they are moved to, or the model's modules."""


def setting(default: Any, reader: Reader, help: str = "", *, scope: str = MOVING) -> Any:
    """A field of a settings class. ``None``, where it is the default, needs no reading.

    Args:
        default: Its default.
        reader: How it is read.
        help: What it means, for training arguments, docstrings and tables. ``{tier}`` stands for that setting's name.
        scope: :data:`MOVING`, :data:`DRIVES` or :data:`MODEL`.
    """
    metadata = {"reader": optional(reader) if default is None else reader, "help": help, "scope": scope}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class FieldCheck:
    """``with check:`` collects an error; :meth:`good` says which fields may be compared, :attr:`name` their names."""

    def __init__(self, check: Any, wrong: set[str], name: Callable[[str], str]):
        self._check = check
        self._wrong = wrong
        self.name = name

    def __enter__(self) -> None:
        self._check.__enter__()

    def __exit__(self, *error: Any) -> bool:
        return bool(self._check.__exit__(*error))

    def good(self, *names: str) -> bool:
        """Whether all of these fields could be read."""
        return not self._wrong.intersection(names)


@contextlib.contextmanager
def read_fields(instance: Any, what: str, prefix: str = "") -> Iterator[FieldCheck]:
    """Read all fields of the dataclass ``instance`` that are declared with :func:`setting`, in place.

    All errors, with those found inside, are raised as one error at the end. Names in messages begin with ``prefix``.
    """
    names = names_of(type(instance))

    def name(field: str) -> str:
        return names.get(field, prefix + field)

    with collect_errors(what) as check:
        wrong = set()
        for field in dataclasses.fields(instance):
            reader = field.metadata.get("reader")
            if reader is None:
                continue
            value = getattr(instance, field.name)
            # Until it is read, the default: what is compared afterwards has the right type in any case.
            wrong.add(field.name)
            make: Any = field.default_factory
            object.__setattr__(instance, field.name, field.default if make is dataclasses.MISSING else make())
            with check:
                object.__setattr__(instance, field.name, reader(name(field.name), value))
                wrong.remove(field.name)
        yield FieldCheck(check, wrong, name)


def help_of(cls: Any, name: str, named: Callable[[str], str] = str) -> str:
    """What the field ``name`` of the settings class ``cls`` means; ``named`` says what other fields are called."""
    names = {field.name: named(field.name) for field in dataclasses.fields(cls)}
    return str(cls.__dataclass_fields__[name].metadata["help"].format_map(names))


def described(cls: type[T]) -> type[T]:
    """A settings class whose docstring ends with what its fields mean."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    lines = "".join(f"\n    {name}: {help_of(cls, name)}" for name in names)
    cls.__doc__ = f"{inspect.getdoc(cls)}\n\nArgs:{lines}\n"
    return cls


def reader_of(cls: Any, name: str) -> Reader:
    """How the field ``name`` of the settings class ``cls`` is read. Raises ``KeyError`` if there is none."""
    reader: Reader = cls.__dataclass_fields__[name].metadata["reader"]
    return reader


# ------------------------------------------------------------------------------------------------------------- readers


def optional(reader: Reader) -> Reader:
    """``None`` stays; anything else is read."""
    return dataclasses.replace(reader, read=lambda name, value: None if value is None else reader(name, value))


def text(*, may_be_empty: bool = False) -> Reader:
    """Text, without NUL characters."""

    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or not (value or may_be_empty):
            raise OffloadConfigError(f"{name}={shown(value)} is not text.")
        return _checked_text(name, value)

    return Reader(read, ALWAYS)


def one_of(allowed: Iterable[str], aliases: Mapping[str, str] | None = None, *, on_off: bool = False) -> Reader:
    """One of some words; with ``on_off``, true and false stand for "on" and "off", as YAML 1.1 reads them unquoted."""
    allowed, aliases = tuple(allowed), aliases or {}

    def read(name: str, value: Any) -> str:
        if on_off and isinstance(value, bool):
            value = "on" if value else "off"
        if isinstance(value, str):
            value = aliases.get(value, value)
        choose(name, value, allowed, aliases)
        return str(value)

    return Reader(read, NEVER if on_off else ALWAYS, choices=allowed)


def flag() -> Reader:
    """True or false."""

    def read(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise OffloadConfigError(f"{name}={shown(value)} is neither true nor false.")
        return value

    return Reader(read, kind=bool)


def whole(at_least: int, what: str = "", *, at_most: int = LARGEST) -> Reader:
    """A whole number in that range, by default as fits into 64 bits; ``what`` it counts ("of blocks")."""

    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise OffloadConfigError(f"{name}={shown(value)} is not a whole number{what and ' '}{what}.")
        if value < at_least:
            raise OffloadConfigError(f"{name}={shown(value)} is too small: give {at_least} or more.")
        if value > at_most:
            raise OffloadConfigError(f"{name}={shown(value)} is too large: give {at_most} or less.")
        return value

    return Reader(read, kind=int, unit=what.removeprefix("of "))


def number(*, above: float = -math.inf, at_least: float = -math.inf, at_most: float = math.inf) -> Reader:
    """A finite number in that range."""
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("above", above), ("at least", at_least), ("at most", at_most))
        if math.isfinite(bound)
    ]

    def read(name: str, value: Any) -> float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not abs(value) <= 1e300 or not above < value or not at_least <= value <= at_most:
            raise OffloadConfigError(f"{name}={shown(value)} is not a number{bounds and ' '}{' and '.join(bounds)}.")
        return float(value) if isinstance(value, float) else value

    return Reader(read, kind=float)


def size(*, at_least: int = 0) -> Reader:
    """A number of bytes, or text such as ``"20GiB"``."""

    def read(name: str, value: Any) -> int:
        found = parse_bytes(value, name)
        if found < at_least:
            raise OffloadConfigError(f"{name}={shown(value)} is too small: give {at_least} or more, or leave it out.")
        return found

    return Reader(read, ALWAYS, unit="bytes")


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

    return Reader(read, SCALAR)


def patterns() -> Reader:
    """One path or several, not yet looked up."""

    def read(name: str, value: Any) -> tuple[str, ...]:
        parts = [value] if isinstance(value, str) else items(value)
        if not parts or not all(isinstance(part, str) and part for part in parts):
            raise OffloadConfigError(f"{name}={shown(value)} is neither a path nor a list of paths.")
        for part in parts:
            expand(name, part)
        return tuple(_checked_text(name, part) for part in parts)

    return Reader(read, SCALAR)


def path_text() -> Reader:
    """A path, as text."""

    def read(name: str, value: Any) -> str:
        found: str = text()(name, os.fspath(value) if isinstance(value, os.PathLike) else value)
        expand(name, found)
        return found

    return Reader(read, ALWAYS)


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

    return Reader(read, SCALAR, splits=True)


def mapping(what: str) -> Reader:
    """A mapping whose keys are text."""

    def read(name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise OffloadConfigError(f"{name}={shown(value)} is not a mapping{what and ' '}{what}.")
        return value

    return Reader(read)


def section(cls: type[Any], what: str = "", *, short: str | None = None) -> Reader:
    """A mapping that is read as settings of ``cls``; with ``short``, text alone stands for that one of them."""

    def read(name: str, value: Any) -> Any:
        if isinstance(value, cls):
            return value
        values = {short: value} if short is not None and isinstance(value, str) else value
        if not isinstance(values, Mapping):
            raise OffloadConfigError(f"{name}={shown(value)} is not a mapping{what and ' '}{what}.")
        return from_mapping(cls, values, name)

    return Reader(read, SCALAR if short is not None else NEVER)


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
