"""The section ``training`` of a recipe: fields of ``TrainingArguments``, by name and type. What their values mean, and which
exclude each other, transformers itself says when it makes the arguments.
"""

import ast
import functools
import importlib.util
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import ALWAYS, NEVER, SCALAR
from hf_offload.settings.load import collect_errors
from hf_offload.settings.schema import FIELDS, argument
from hf_offload.settings.shown import nearest, shown
from hf_offload.settings.text_files import read_text
from hf_offload.settings.values import expand, mapping

# What a recipe run decides itself, so that a recipe cannot ask for it and be ignored.
_NOT_FOR_RECIPES = {
    "do_train": "a recipe always trains: drop it",
    "do_eval": "a recipe with data.validation is evaluated: drop it, and set eval_strategy for when",
    "do_predict": "a recipe does not predict: do so with the saved model afterwards",
    "resume_from_checkpoint": "drop it, and start the run with --resume to go on from its last checkpoint",
}
_OF_OFFLOADING = {argument(field): field for field in FIELDS}
_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "dict": dict, "list": list}


def training_value(key: str, value: Any) -> Any:
    """``value``, if ``TrainingArguments`` has a field ``key`` of its type that a recipe may set.

    Raises :class:`~hf_offload.errors.OffloadConfigError` otherwise.
    """
    fields = training_fields()
    name = f"training.{key}"
    if key in _NOT_FOR_RECIPES:
        raise OffloadConfigError(f"{name}: {_NOT_FOR_RECIPES[key]}.")
    if key in _OF_OFFLOADING:
        field = _OF_OFFLOADING[key]
        section = " (or a memory mode into memory)" if field.startswith("memory_mode") else ""
        raise OffloadConfigError(
            f"{name}: settings of offloading go into the section offload{section}: write offload.{field}."
        )
    if fields and key not in fields:
        raise OffloadConfigError(f"training: TrainingArguments has no field {shown(key)}.{nearest(key, fields)}")
    kinds = fields.get(key, frozenset())
    allowed = tuple(_TYPES[kind] for kind in sorted(kinds) if kind in _TYPES) + ((int,) if "float" in kinds else ())
    if value is None or not kinds or "Any" in kinds:
        return value
    if not isinstance(value, allowed) or (isinstance(value, bool) and "bool" not in kinds):
        plain = {"null" if kind == "None" else kind for kind in kinds if kind in _TYPES or kind == "None"}
        raise OffloadConfigError(f"{name}={shown(value)} is not of type {' or '.join(sorted(plain))}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise OffloadConfigError(f"{name}={shown(value)} is not a number.")
    if key == "output_dir":
        expand(name, value)
    return value


def training_values(name: str, values: Any) -> dict[str, Any]:
    """The whole section. Raises likewise, for all fields at once."""
    found = {}
    with collect_errors(name) as check:
        for key, value in mapping("of training arguments")(name, values).items():
            with check:
                found[key] = training_value(key, value)
    return found


def training_text(key: str) -> str:
    """How an override of ``training.key`` is read (:attr:`~hf_offload.settings.classes.Form.as_text`)."""
    kinds = training_fields().get(key, frozenset())
    if "str" not in kinds or kinds & {"int", "float", "bool"}:
        return NEVER
    return ALWAYS if kinds <= {"str", "None"} else SCALAR


# --------------------------------------------------------------------------------------------- the fields that there are


@functools.cache
def training_fields() -> Mapping[str, frozenset[str]]:
    """Field of ``TrainingArguments`` -> names of the types it takes: ``{"max_steps": {"int"}, ...}``. Read from the source of
    transformers, which takes seconds to import; none where that is not as expected.
    """
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
