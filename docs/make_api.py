"""Writes docs/api.md from the docstrings of the public names: `make api`, or `python docs/make_api.py`."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import hf_offload

PAGE = Path(__file__).with_name("api.md")
OPENING = """# The names of the API

Made from docstrings by `make api`; what is written here by hand is lost. `python -m pydoc hf_offload.OffloadConfig` shows
the same in a terminal.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([OPENING, *(_entry(name, getattr(hf_offload, name)) for name in hf_offload.__all__)])


def _entry(name: str, thing: Any) -> str:
    parts = [f"## {name}\n", f"`{thing.__module__}.{name}`\n", _text(thing)]
    if inspect.isclass(thing):
        # Of an arguments class, what it adds to the class of transformers or TRL that it stands on.
        own = vars(thing).get("__annotations__", {})
        fields = (
            [field for field in dataclasses.fields(thing) if field.name in own]
            if dataclasses.is_dataclass(thing)
            else []
        )
        if fields:
            rows = [f"| `{field.name}` | `{_default(field)}` | {field.metadata.get('help', '')} |" for field in fields]
            parts.append("\n".join(["| field | default | |", "|---|---|---|", *rows]) + "\n")
        for member, value in vars(thing).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                shown = member if isinstance(value, property) else f"{member}{_signature(value)}"
                parts.append(f"### {name}.{member}\n\n`{shown}`\n\n{_text(value)}")
    elif inspect.isfunction(thing):
        parts.insert(1, f"`{name}{_signature(thing)}`\n")
    return "\n".join(parts)


def _default(field: "dataclasses.Field[Any]") -> str:
    return "required" if field.default is dataclasses.MISSING else repr(field.default)


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
            lines.append(line)
    return "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
