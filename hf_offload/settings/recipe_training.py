"""The section ``training`` of a recipe: fields of ``TrainingArguments``, each with a value of its type."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import nearest

# What a recipe run decides itself, so that a recipe cannot ask for it and be ignored.
_NOT_FOR_RECIPES = {
    "do_train": "a recipe always trains: drop it",
    "do_eval": "a recipe with data.validation is evaluated: drop it, and set eval_strategy for when",
    "do_predict": "a recipe does not predict: do so with the saved model afterwards",
    "resume_from_checkpoint": "drop it, and start the run with --resume to go on from its last checkpoint",
}


def training_value(key: str, value: Any) -> Any:
    """Check one key of the training section against TrainingArguments; return the value in the field's type."""
    from transformers import TrainingArguments

    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    if key in _NOT_FOR_RECIPES:
        raise OffloadConfigError(f"training.{key}: {_NOT_FOR_RECIPES[key]}.")
    if key == "offload" or key.startswith("offload_"):
        raise OffloadConfigError(f"training.{key}: settings of offloading go into the section offload.")
    if key not in names:
        raise OffloadConfigError(f"training: TrainingArguments has no field {key!r}.{nearest(key, names)}")
    hints = tuple(_plain_types(typing.get_type_hints(TrainingArguments)[key]))
    if float in hints and isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, hints) or (isinstance(value, bool) and bool not in hints):
        wanted = " or ".join(sorted({"null" if hint is type(None) else hint.__name__ for hint in hints}))
        raise OffloadConfigError(f"training.{key}={value!r} is not of type {wanted}.")
    return value


def _plain_types(hint: Any) -> Iterator[type]:
    """The classes that ``isinstance`` can check in a type hint: ``dict[str, Any] | None`` -> dict, NoneType."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from _plain_types(part)
    elif origin is typing.Literal:
        yield from {type(value) for value in typing.get_args(hint)}
    elif hint is Any:
        yield object
    else:
        yield origin or hint
