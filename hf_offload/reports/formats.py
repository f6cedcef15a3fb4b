"""Rows of a benchmark as Markdown and JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload.settings.text_files import write_whole

REFERENCE = "baseline"
"""The strategy that a benchmark compares the others with: no offloading."""


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table as Markdown, without a newline at the end."""
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows),
    ]
    return "\n".join(lines)


def json_text(values: Mapping[str, Any]) -> str:
    """``values`` as JSON."""
    return json.dumps(values, indent=1) + "\n"


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write files from their names to their texts into ``folder``; returns their paths."""
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]
