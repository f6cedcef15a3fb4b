"""Names and types of ``TrainingArguments``, read from the source of transformers: importing it takes seconds.

Where the source is not as expected, there are none, and transformers itself checks later.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.text_files import read_text


@functools.cache
def training_fields() -> Mapping[str, frozenset[str]]:
    """Field of ``TrainingArguments`` -> names of the types it takes: ``{"max_steps": {"int"}, ...}``."""
    return {
        line.target.id: frozenset(_types(line.annotation))
        for line in _body()
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and _is_init_field(line)
    }


def _body() -> list[ast.stmt]:
    spec = importlib.util.find_spec("transformers")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        try:
            tree = ast.parse(read_text(Path(folder) / "training_args.py", "The module"))
        except (OffloadConfigError, SyntaxError):
            continue
        for line in tree.body:
            if isinstance(line, ast.ClassDef) and line.name == "TrainingArguments":
                return line.body
    return []


def _is_init_field(line: ast.AnnAssign) -> bool:
    keywords = line.value.keywords if isinstance(line.value, ast.Call) else []
    hidden = any(one.arg == "init" and ast.unparse(one.value) == "False" for one in keywords)
    return not hidden and "ClassVar" not in ast.unparse(line.annotation)


def _types(hint: ast.expr) -> Iterator[str]:
    if isinstance(hint, ast.BinOp):
        yield from _types(hint.left)
        yield from _types(hint.right)
    elif isinstance(hint, ast.Subscript):
        outer, inner = ast.unparse(hint.value), hint.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if outer in ("Union", "Optional"):
            for part in parts:
                yield from _types(part)
            if outer == "Optional":
                yield "None"
        elif outer == "Literal":
            yield from {type(part.value).__name__ for part in parts if isinstance(part, ast.Constant)}
        else:
            yield outer
    elif isinstance(hint, ast.Constant) and isinstance(hint.value, str):
        yield from _types(ast.parse(hint.value, mode="eval").body)
    else:
        yield ast.unparse(hint)
