"""Options that several commands take: declared once here, or by the settings class that stands behind them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from hf_offload.settings.classes import build, forms, help_of

Given = Mapping[str, Any]
"""Options of a group that were given, by field, as they were written."""
T = TypeVar("T")
_LINE = 120

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes of the recipe, such as training.max_steps=3."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def option(field: str) -> str:
    """``option("memory_budget") == "--memory-budget"``."""
    return f"--{field.replace('_', '-')}"


class OptionGroup:
    """An option for each of ``fields`` of a settings class (:mod:`hf_offload.settings.classes`)."""

    def __init__(self, settings: type[Any], fields: tuple[str, ...], panel: str):
        self.settings, self.fields, self._panel = settings, fields, panel

    def parameters(self) -> list[inspect.Parameter]:
        """A keyword parameter for each option, as typer reads it."""
        found = []
        for field in self.fields:
            declared = typer.Option(
                option(field),
                help=in_short(help_of(self.settings, field, self._named)),
                metavar="SIZE" if forms(self.settings)[field].unit == "bytes" else "VALUE",
                rich_help_panel=self._panel,
            )
            annotation = Annotated[str | None, declared]
            found.append(inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
        return found

    def read(self, given: Given) -> dict[str, Any]:
        """The settings that were ``given``, read and checked together; errors name the options.

        Raises :class:`~hf_offload.errors.OffloadConfigError`.
        """
        values = {field: forms(self.settings)[field].from_text(text) for field, text in given.items()}
        settings = build(self.settings, values, "options", self._named)
        return {field: getattr(settings, field) for field in given}

    def _named(self, field: str) -> str:
        return option(field) if field in self.fields else field


def in_short(text: str) -> str:
    """What a setting means, in one line: if that is too long its first sentence, or the beginning of that."""
    text = text.removeprefix('With tier="auto": ')
    for end in (". ", ": "):
        if len(text) > _LINE:
            text = f"{text.partition(end)[0].removesuffix('.')}."
    return text[:1].upper() + text[1:]


def with_options(**groups: OptionGroup) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A command that takes all options of ``groups``; each group reaches its parameter of that name as :data:`Given`."""

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            group = groups.get(parameter.name)
            parameters += [parameter.replace(kind=parameter.KEYWORD_ONLY)] if group is None else group.parameters()

        @functools.wraps(command)
        def call(**values: Any) -> T:
            given = {
                name: {field: value for field in group.fields if (value := values.pop(field)) is not None}
                for name, group in groups.items()
            }
            return command(**given, **values)

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


def fields_of(settings: type[Any]) -> tuple[str, ...]:
    """The names of all fields of a settings class."""
    return tuple(field.name for field in dataclasses.fields(settings))
