"""Writes docs/command_line.md from the declarations of the command ``hf-offload``: `make api`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from hf_offload.cli.main import EXIT_STATUS, app

PAGE = Path(__file__).with_name("command_line.md")
OPENING = f"""# Command line

This page lists every command of `hf-offload` with its arguments and options. It is generated from the commands by
`make api`; edits by hand are lost. The option `--help` of each command prints the same in a terminal.

Sizes are numbers of bytes or text such as `20GiB`. [Settings](settings.md) says more about the options that are
settings of a run.

{EXIT_STATUS}

`hf-offload --install-completion` sets up the completion of commands and options with the Tab key, in bash, zsh, fish and
PowerShell; `--show-completion` prints the script instead.
"""


def page() -> str:
    """The page of the command line."""
    return "\n".join([OPENING, *_sections("hf-offload", typer.main.get_command(app))])


def _sections(name: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", {})
    if command.name != app.info.name:
        depth = name.count(" ") + 1
        yield f"{'#' * depth} {name}\n\n{_text(command.help)}\n"
        if command.epilog:
            yield _text(command.epilog) + "\n"
        if not inner:
            yield from _tables(command)
    for key, one in inner.items():
        yield from _sections(f"{name} {key}", one)


def _tables(command: Any) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    if arguments:
        rows = [f"| `{_name(one)}` | {_meaning(one)} |" for one in arguments]
        yield "\n".join(["| argument | meaning |", "|---|---|", *rows]) + "\n"
    panels: dict[str, list[Any]] = {}
    for one in command.params:
        if one.param_type_name == "option" and not one.hidden:
            panels.setdefault(getattr(one, "rich_help_panel", None) or "Options", []).append(one)
    for panel, options in panels.items():
        if len(panels) > 1:
            yield f"{panel}:\n"
        rows = [f"| `{_name(one)}` | {_default(one)} | {_meaning(one)} |" for one in options]
        yield "\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"{parameter.metavar or parameter.name.upper()}{'...' if parameter.nargs == -1 else ''}"
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag:
        return names
    return f"{names} {parameter.metavar or 'VALUE'}"


def _default(parameter: Any) -> str:
    default = parameter.default
    if parameter.required:
        return "required"
    if isinstance(default, bool) and parameter.secondary_opts:
        return f"`{(parameter.opts if default else parameter.secondary_opts)[0]}`"
    return "" if default is None or default is False or default in ([], ()) else f"`{default}`"


def _meaning(parameter: Any) -> str:
    return _text(parameter.help).replace("|", "\\|")


def _text(text: str | None) -> str:
    """One paragraph a line, with what Markdown would take for HTML or emphasis as it is."""
    paragraphs = re.split(r"\n\s*\n", (text or "").strip())
    return re.sub(r"(?<!`)<([\w-]+)>", r"`\1`", "\n\n".join(" ".join(one.split()) for one in paragraphs))


if __name__ == "__main__":
    PAGE.write_text(page())
