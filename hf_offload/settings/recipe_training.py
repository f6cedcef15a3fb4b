"""The section ``training`` of a recipe: fields of ``TrainingArguments``, by name and type. What their values mean, and which
exclude each other, transformers itself says when it makes the arguments.
"""

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import collect_errors
from hf_offload.settings.schema import FIELDS, argument
from hf_offload.settings.shown import nearest, shown
from hf_offload.settings.values import expand, mapping

# What a recipe run decides itself, so that a recipe cannot ask for it and be ignored.
_NOT_FOR_RECIPES = {
    "do_train": "a recipe always trains: drop it",
    "do_eval": "a recipe with data.validation is evaluated: drop it, and set eval_strategy for when",
    "do_predict": "a recipe does not predict: do so with the saved model afterwards",
    "resume_from_checkpoint": "drop it, and start the run with --resume to go on from its last checkpoint",
}
_OF_OFFLOADING = {argument(field): field for field in FIELDS}


def training_values(name: str, values: Any) -> dict[str, Any]:
    """The section, as far as it can be checked without transformers.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for all fields at once.
    """
    found = dict(mapping("of training arguments")(name, values))
    with collect_errors(name) as check:
        for key, value in found.items():
            with check:
                _check_value(key, value)
    return found


def _check_value(key: str, value: Any) -> None:
    name = f"training.{key}"
    if key in _NOT_FOR_RECIPES:
        raise OffloadConfigError(f"{name}: {_NOT_FOR_RECIPES[key]}.")
    if key in _OF_OFFLOADING:
        field = _OF_OFFLOADING[key]
        section = " (or a memory mode into memory)" if field.startswith("memory_mode") else ""
        raise OffloadConfigError(
            f"{name}: settings of offloading go into the section offload{section}: write offload.{field}."
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise OffloadConfigError(f"{name}={shown(value)} is not a number.")
    if key == "output_dir" and value is not None:
        expand(name, value)


def check_training(values: Mapping[str, Any]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for fields that ``TrainingArguments`` does not have, and values of
    other types than it declares. Loads torch, which takes seconds.
    """
    fields = training_fields()
    with collect_errors("training") as check:
        for key, value in values.items():
            with check:
                if key not in fields:
                    raise OffloadConfigError(
                        f"training: TrainingArguments has no field {shown(key)}.{nearest(key, fields)}"
                    )
                if value is not None and not _is_one_of(value, fields[key]):
                    kinds = {"null" if kind is types.NoneType else kind.__name__ for kind in fields[key]}
                    raise OffloadConfigError(
                        f"training.{key}={shown(value)} is not of type {' or '.join(sorted(kinds))}."
                    )


def _is_one_of(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def training_fields() -> dict[str, tuple[type, ...]]:
    """Field of ``TrainingArguments`` -> the types that may stand in a recipe. Loads torch."""
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    return {field.name: _kinds(hints[field.name]) for field in dataclasses.fields(TrainingArguments) if field.init}


def _kinds(hint: Any) -> tuple[type, ...]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(dict.fromkeys(kind for part in typing.get_args(hint) for kind in _kinds(part)))
    if origin is typing.Literal:
        return tuple(dict.fromkeys(type(value) for value in typing.get_args(hint)))
    if hint is Any:
        return (object,)
    kind: type = origin or hint
    return (str,) if issubclass(kind, enum.Enum) else (kind,)
