"""The section ``training`` of a recipe: fields of ``TrainingArguments``, each with a value of its type and range."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.library_source import enum_values, reporters, training_fields
from hf_offload.settings.load import choose
from hf_offload.settings.schema import OffloadConfig, argument
from hf_offload.settings.shown import nearest, shown
from hf_offload.settings.values import ALWAYS, NEVER, SCALAR, Reader, items, mapping, number, path_text, text, whole

# What a recipe run decides itself, so that a recipe cannot ask for it and be ignored.
_NOT_FOR_RECIPES = {
    "do_train": "a recipe always trains: drop it",
    "do_eval": "a recipe with data.validation is evaluated: drop it, and set eval_strategy for when",
    "do_predict": "a recipe does not predict: do so with the saved model afterwards",
    "resume_from_checkpoint": "drop it, and start the run with --resume to go on from its last checkpoint",
}
_OF_OFFLOADING = {argument(field.name): field.name for field in dataclasses.fields(OffloadConfig)}
_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "dict": dict, "list": list}
_LARGEST_SEED = 2**32 - 1
"""Most that NumPy's generator takes."""

_AT_LEAST_ONE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "eval_accumulation_steps",
    "dataloader_prefetch_factor",
    "torch_empty_cache_steps",
    "ddp_timeout",
    "ddp_bucket_cap_mb",
)
_NOT_NEGATIVE = ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "eval_delay", "neftune_noise_alpha")
_ABOVE_ZERO = ("num_train_epochs", "logging_steps", "save_steps", "eval_steps", "adam_epsilon")


def _max_steps(name: str, value: Any) -> int:
    found: int = whole(-1)(name, value)
    if found == 0:
        raise OffloadConfigError(f"{name}=0 trains nothing: give 1 or more, or leave it out to train whole epochs.")
    return found


def _seed(name: str, value: Any) -> int:
    found: int = whole(0)(name, value)
    if found > _LARGEST_SEED:
        raise OffloadConfigError(f"{name}={found} is too large: give {_LARGEST_SEED} or less.")
    return found


def _report_to(name: str, value: Any) -> Any:
    known = ("none", "all", *reporters())
    for one in [value] if isinstance(value, str) else items(value):
        choose(name, one, known)
    return value


_RANGES: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_AT_LEAST_ONE, whole(1)),
    **dict.fromkeys(_NOT_NEGATIVE, number(at_least=0)),
    **dict.fromkeys(_ABOVE_ZERO, number(above=0)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), number(at_least=0, at_most=1)),
    "label_smoothing_factor": number(at_least=0, at_most=1),
    "dataloader_num_workers": whole(0),
    "max_steps": _max_steps,
    "seed": _seed,
    "data_seed": _seed,
    "report_to": _report_to,
    "output_dir": path_text(),
}


def training_value(key: str, value: Any) -> Any:
    """Check one key of the training section against TrainingArguments; return the value in the field's type."""
    fields = training_fields()
    if key in _NOT_FOR_RECIPES:
        raise OffloadConfigError(f"training.{key}: {_NOT_FOR_RECIPES[key]}.")
    if key in _OF_OFFLOADING:
        field = _OF_OFFLOADING[key]
        section = " (or a memory mode into memory)" if field.startswith("memory_mode") else ""
        raise OffloadConfigError(
            f"training.{key}: settings of offloading go into the section offload{section}: write offload.{field}."
        )
    if fields and key not in fields:
        raise OffloadConfigError(f"training: TrainingArguments has no field {shown(key)}.{nearest(key, fields)}")
    name, kinds = f"training.{key}", fields.get(key, frozenset())
    if value is None:
        return None
    if kinds and "Any" not in kinds:
        _check_type(name, value, kinds)
    if key in _RANGES:
        return _RANGES[key](name, value)
    if isinstance(value, str):
        words = [word for kind in sorted(kinds) for word in enum_values(kind)]
        if words:
            choose(name, value, words)
        return text(may_be_empty=True)(name, value)
    if isinstance(value, Mapping):
        return mapping("")(name, value)
    if isinstance(value, float):
        return number()(name, value)
    if isinstance(value, int) and not isinstance(value, bool):
        return whole(-(2**63))(name, value)
    return value


def training_reader(key: str) -> Reader | None:
    """How an override of ``training.key`` is read."""
    kinds = training_fields().get(key)
    if kinds is None:
        return None
    as_text = NEVER if "str" not in kinds or kinds & {"int", "float", "bool"} else SCALAR
    return Reader(lambda _name, value: training_value(key, value), ALWAYS if kinds <= {"str", "None"} else as_text)


def _check_type(name: str, value: Any, kinds: frozenset[str]) -> None:
    allowed = tuple(_TYPES[kind] for kind in sorted(kinds) if kind in _TYPES)
    if "float" in kinds:
        allowed = (*allowed, int)
    if not isinstance(value, allowed) or (isinstance(value, bool) and "bool" not in kinds):
        plain = {"null" if kind == "None" else kind for kind in kinds if kind in _TYPES or kind == "None"}
        raise OffloadConfigError(f"{name}={shown(value)} is not of type {' or '.join(sorted(plain))}.")
