"""Settings classes: how settings are declared, checked, explained and written as text.

A settings class is a frozen dataclass that pydantic builds and checks (:func:`settings`). Each field is declared once, with
its type (:mod:`hf_offload.settings.values`), bounds and default, and where options are made of it, with text below that says
what it means; ``{tier}`` there stands for the name of that setting. All else is derived (:func:`forms`, :func:`help_of`):
variables, options, training arguments, tables.

Wrong values raise :class:`~hf_offload.errors.OffloadConfigError`, and nothing else.
"""

import contextlib
import dataclasses
import enum
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic
import pydantic.dataclasses
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import collect_errors, joined
from hf_offload.settings.shown import cropped, listed, nearest, shown

T = TypeVar("T")
Named = Callable[[str], str]
"""What a field is called where its value was given, such as ``offload_ram_budget``."""

# ------------------------------------------------------------------------------------------------------- declaring settings


class Scope(enum.Enum):
    """What a setting is about, in its ``Annotated`` type; :attr:`MOVING` where nothing is said."""

    MOVING = "moving"
    """Tensors that move."""
    DRIVES = "drives"
    """The files on drives that they are moved to."""
    MODEL = "model"
    """The model's modules."""


def counted(unit: str, **bounds: Any) -> Any:
    """Bounds of a number of ``unit``, such as ``"blocks"``."""
    return Field(**bounds, json_schema_extra={"unit": unit})


if TYPE_CHECKING:
    from dataclasses import dataclass as explained_settings
    from dataclasses import dataclass as settings
else:

    def settings(*, _explained: bool = False, **options: Any) -> Callable[[type[T]], type[T]]:
        """``@settings(frozen=True, kw_only=True)``: a dataclass whose values pydantic checks."""

        def declare(cls: type[T]) -> type[T]:
            config = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=_explained)
            made = pydantic.dataclasses.dataclass(**options, config=config)(cls)
            made.__init__ = _init
            return made

        return declare

    def explained_settings(**options: Any) -> Callable[[type[T]], type[T]]:
        """The same, where text below each field says what it means (:func:`help_of`)."""
        return settings(_explained=True, **options)


def _init(self: Any, *args: Any, **values: Any) -> None:
    _fill(self, ArgsKwargs(args, values), type(self).__name__, str)


def _fill(instance: Any, given: ArgsKwargs, what: str, named: Named) -> None:
    """Check ``given`` and set it on ``instance``. Validators find ``named`` as their context."""
    try:
        type(instance).__pydantic_validator__.validate_python(given, self_instance=instance, context=named)
    except ValidationError as error:
        raise joined(what, list(_problems(type(instance), error, what, named))) from None


def build(cls: type[T], values: Mapping[str, Any], what: str, named: Named = str) -> T:
    """``cls(**values)``, whose fields errors call by other names. Raises one error for all that is wrong in ``what``."""
    instance = cls.__new__(cls)
    _fill(instance, ArgsKwargs((), dict(values)), what, named)
    return instance


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str, named: Named = str) -> T:
    """:func:`build` from what a file or a script says: unknown keys and wrong values are named together, after ``where``."""
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    with collect_errors(where) as check:
        for key in values:
            with check:
                if key not in known:
                    raise OffloadConfigError(_unknown(where, key, known))
        with check:
            try:
                made = build(cls, {key: value for key, value in values.items() if key in known}, where, named)
            except OffloadConfigError as error:
                problems = error.problems or (str(error),)
                raise joined(where, [one if one.startswith(where) else f"{where}: {one}" for one in problems]) from None
    return made


def in_section(section: str) -> Named:
    """Names of fields in a section of a file: ``in_section("data")("hub") == "data.hub"``."""
    return lambda field: f"{section}.{field}"


# What pydantic's types of errors say.
_WRONG = {
    **dict.fromkeys(("int_type", "int_from_float"), "is not a whole number{unit}"),
    **dict.fromkeys(("float_type", "finite_number"), "is not a number"),
    **dict.fromkeys(("string_type", "string_too_short", "string_unicode"), "is not text"),
    "value_error": "{said}",
    "bool_type": "is neither true nor false",
    "greater_than": "is too small: give more than {gt}",
    "greater_than_equal": "is too small: give {ge} or more",
    "less_than": "is too large: give less than {lt}",
    "less_than_equal": "is too large: give {le} or less",
}


def _problems(cls: type[Any], error: ValidationError, what: str, named: Named) -> Iterator[str]:
    """What is wrong, each with the field it is about."""
    fields = list(cls.__pydantic_fields__)
    for one in error.errors(include_url=False):
        field = str(next(iter(one["loc"]), ""))
        if field.isdigit():  # given by its position
            field = fields[int(field)] if int(field) < len(fields) else field
        context = one.get("ctx", {})
        cause = context.get("error")
        if isinstance(cause, OffloadConfigError):
            yield from cause.problems or (str(cause),)
        elif one["type"].startswith("missing"):
            yield f"{named(field)} is missing."
        elif one["type"].startswith("unexpected"):
            yield _unknown(what, field, fields)
        else:
            unit = forms(cls)[field].unit
            numbers = {name: _plain(bound) for name, bound in context.items()}
            wrong = _WRONG.get(one["type"], "cannot be taken: {said}").format(
                **{"unit": unit and f" of {unit}", "said": cause or cropped(one["msg"]), **numbers}
            )
            yield f"{named(field)}={shown(one['input'])} {wrong}."


def _plain(bound: Any) -> Any:
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _unknown(where: str, key: Any, known: Sequence[str]) -> str:
    return f"{where}: unknown key {shown(key)}.{nearest(key, known)} Known: {listed(known, key)}."


def help_of(cls: Any, name: str, named: Named = str) -> str:
    """What the field ``name`` of the settings class ``cls`` means; ``named`` says what other fields are called."""
    names = {field.name: named(field.name) for field in dataclasses.fields(cls)}
    return " ".join((cls.__pydantic_fields__[name].description or "").split()).format_map(names)


def described(cls: type[T]) -> type[T]:
    """A settings class whose docstring ends with what its fields mean."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    lines = "".join(f"\n    {name}: {help_of(cls, name)}" for name in names)
    cls.__doc__ = f"{inspect.getdoc(cls)}\n\nArgs:{lines}\n"
    return cls


# --------------------------------------------------------------------------------------------------------- settings as text


@dataclasses.dataclass(frozen=True)
class Form:
    """How a setting is written outside of Python, derived from its JSON schema.

    Attributes:
        kind: The type of the value where it is not read from text.
        scope: What the setting is about.
        unit: What a number counts, such as ``"bytes"``.
        splits: Whether commas separate values in a text that came from a variable or an argument.
    """

    kind: type
    scope: Scope
    unit: str
    splits: bool

    def from_text(self, text: str) -> Any:
        """The value of a variable or an argument. Wrong text is returned as it is: the settings class refuses it."""
        if self.splits:
            return [part.strip() for part in text.split(",") if part.strip()] if text.strip() else None
        if self.kind is bool:
            return {"true": True, "on": True, "false": False, "off": False}.get(text.strip().lower(), text)
        if self.kind is not str:
            with contextlib.suppress(ValueError):
                return self.kind(text)
        return text

    def to_text(self, name: str, value: Any) -> str:
        """The text from which the settings class reads ``value``, which is none of ``None``."""
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


_forms: dict[Any, Mapping[str, Form]] = {}


def forms(cls: type[Any]) -> Mapping[str, Form]:
    """The form of each field of a settings class."""
    if cls not in _forms:
        _forms[cls] = _forms_of(cls)
    return _forms[cls]


def _forms_of(cls: Any) -> Mapping[str, Form]:
    properties: dict[str, Any] = TypeAdapter(cls).json_schema().get("properties", {})
    scopes = {
        name: next((one for one in field.metadata if isinstance(one, Scope)), Scope.MOVING)
        for name, field in cls.__pydantic_fields__.items()
    }
    return {name: _form(schema, scopes[name]) for name, schema in properties.items()}


def _form(schema: dict[str, Any], scope: Scope) -> Form:
    for one in schema.get("anyOf", ()):
        if one.get("type") != "null":
            schema = {**one, **schema}
    named = schema.get("type", ())
    kind = {"integer": int, "number": float, "boolean": bool}.get(named if isinstance(named, str) else "", str)
    return Form(
        kind=kind,
        scope=scope,
        unit=schema.get("unit", ""),
        splits=schema.get("format") == "paths",
    )
