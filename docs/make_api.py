"""Writes docs/api.md from docstrings and docs/settings.md from declarations: `make api`, or `python docs/make_api.py`."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import hf_offload
from hf_offload.settings.classes import Scope, forms, help_of
from hf_offload.settings.schema import OffloadConfig, argument

PAGE = Path(__file__).with_name("api.md")
SETTINGS_PAGE = Path(__file__).with_name("settings.md")
OPENING = """# API

This page documents every public class and function of `hf_offload`. It is generated from docstrings by `make api`;
edits by hand are lost. `python -m pydoc hf_offload.OffloadConfig` shows the same in a terminal.
"""

SETTINGS_OPENING = """# Settings

This page lists every setting of offloading with its names, default and unit. It is generated from the declarations of
`OffloadConfig` by `make api`; edits by hand are lost.

A setting has one name everywhere:

| where | how it is written | example |
|---|---|---|
| `OffloadConfig`, `OffloadPlugin` | its name, as a keyword | `ram_budget="8GiB"` |
| training arguments | its name, after `offload_` if it is about moving tensors | `offload_ram_budget="8GiB"` |
| environment variables | `HF_OFFLOAD_` and its name in capitals | `HF_OFFLOAD_RAM_BUDGET=8GiB` |
| section `offload` of a recipe | its name, as a key | `ram_budget: 8GiB` |
| section `hf_offload_config` of accelerate's config file | its name, as a key | `ram_budget: 8GiB` |

`tier` is called `offload` among training arguments, and is `none` by default there. Sizes are numbers of bytes or text
such as `20GiB`. Directories and names in variables and arguments are separated by commas.
"""
SCOPES = {
    Scope.MOVING: "What is moved, where, and how",
    Scope.DRIVES: "Files on drives",
    Scope.MODEL: "What changes in the model",
}


def settings_page() -> str:
    """Tables of all settings."""
    parts = [SETTINGS_OPENING]
    for scope, heading in SCOPES.items():
        rows = [
            f"| `{name}` | `{argument(name)}` | `{getattr(OffloadConfig, name)!r}` | {form.unit} "
            f"| {help_of(OffloadConfig, name)} |"
            for name, form in forms(OffloadConfig).items()
            if form.scope is scope
        ]
        head = ["| setting | training argument | default | unit | meaning |", "|---|---|---|---|---|"]
        parts.append("\n".join([f"## {heading}\n", *head, *rows]) + "\n")
    return "\n".join(parts)


def page() -> str:
    """The page of the API."""
    return "\n".join([OPENING, *(_entry(name, getattr(hf_offload, name)) for name in hf_offload.__all__)])


def _entry(name: str, thing: Any) -> str:
    parts = [f"## {name}\n", f"`{thing.__module__}.{name}`\n", _text(thing)]
    if inspect.isclass(thing):
        # Of an arguments class, what it adds to the class of transformers or TRL that it stands on.
        bases = [thing, *(base for base in thing.__bases__ if base.__name__.startswith("_"))]
        own = {name for base in bases for name in vars(base).get("__annotations__", {})}
        fields = (
            [field for field in dataclasses.fields(thing) if field.name in own]
            if dataclasses.is_dataclass(thing)
            else []
        )
        if fields:
            rows = [f"| `{field.name}` | `{_default(field)}` | {_help(field)} |" for field in fields]
            parts.append("\n".join(["| field | default | meaning |", "|---|---|---|", *rows]) + "\n")
        for member, value in vars(thing).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                shown = member if isinstance(value, property) else f"{member}{_signature(value)}"
                parts.append(f"### {name}.{member}\n\n`{shown}`\n\n{_text(value)}")
    elif inspect.isfunction(thing):
        parts.insert(1, f"`{name}{_signature(thing)}`\n")
    return "\n".join(parts)


def _default(field: "dataclasses.Field[Any]") -> str:
    return "required" if field.default is dataclasses.MISSING else repr(field.default)


def _help(field: "dataclasses.Field[Any]") -> str:
    """Of settings, nothing: their class's docstring says it."""
    return "" if "reader" in field.metadata else field.metadata.get("help", "").replace("%%", "%")


def _signature(thing: Any) -> str:
    """Names and defaults; what types they have is said in words below."""
    parameters = [one.replace(annotation=one.empty) for one in inspect.signature(thing).parameters.values()]
    return str(inspect.Signature(parameters))


def _text(thing: Any) -> str:
    """A docstring as Markdown: roles of Sphinx and doubled backticks become code."""
    text = inspect.getdoc(thing) or ""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    lines = []
    for line in text.splitlines():
        heading = re.fullmatch(r"(Args|Attributes|Returns|Raises):", line)
        argument = re.match(r" {4}([\w, ]+): (.*)", line)
        if heading:
            lines.append(f"**{heading.group(1)}**\n")
        elif argument:
            lines.append(f"- `{argument.group(1)}`: {argument.group(2)}")
        else:
            lines.append(re.sub(r"::$", ":", line))
    return "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    SETTINGS_PAGE.write_text(settings_page())
