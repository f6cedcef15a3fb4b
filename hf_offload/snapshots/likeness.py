"""Whether what goes on from a snapshot is like what it was taken of, where shapes of weights do not tell."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hf_offload.errors import SnapshotError

logger = logging.getLogger(__name__)

_LONGEST = 60
"""Longer values are known by their digest: a record is small."""

_NO_MATTER = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Of a config: the type of weights is that of the weights."""


def config_of(model: nn.Module) -> dict[str, str]:
    """The entries of a model's config in words, if it has one as transformers has it."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if to_dict is None:
        return {}
    return {
        str(key): _short(value)
        for key, value in to_dict().items()
        if key not in _NO_MATTER and not str(key).startswith("_")
    }


def optimizer_of(optimizer: Any) -> dict[str, Any]:
    """Class and options of an optimizer that has loaded nothing yet, in words."""
    while hasattr(optimizer, "optimizer"):  # in accelerate's wrapper
        optimizer = optimizer.optimizer
    options: dict[str, list[str]] = {}
    for group in getattr(optimizer, "param_groups", ()):
        for name, value in group.items():
            if name == "params" or (name == "lr" and "initial_lr" in group):  # what a schedule has made of it
                continue
            known = options.setdefault(str(name), [])
            text = _short(value)
            known += [] if text in known else [text]
    return {
        "class": type(optimizer).__qualname__,
        "options": {name: _cut(" and ".join(values)) for name, values in options.items()},
    }


def check_config(there: Mapping[str, str], here: Mapping[str, str], what: str) -> None:
    """Raise :class:`~hf_offload.errors.SnapshotError` if the model of the snapshot that ``what`` names had another one."""
    different = _different(there, here)
    if different:
        raise SnapshotError(
            f"{what} is of a model with another config: {different}. Resume with the config that it was taken with, or start "
            "from the beginning."
        )


def check_optimizers(there: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raise :class:`~hf_offload.errors.SnapshotError` for another class of optimizer, and warn of other options."""
    for known, now in zip(there, here, strict=True):
        if known["class"] != now["class"]:
            raise SnapshotError(
                f"{what} has the state of another optimizer: it is {known['class']} there and {now['class']} here. Resume "
                "with the optimizer that it was taken with, or start from the beginning."
            )
        _warn(
            _different(known["options"], now["options"]),
            f"{what} was taken with other options of the optimizer",
            "Training goes on with those of the snapshot, as with a checkpoint.",
        )


def warn_of_other_data(there: Mapping[str, Any], here: Mapping[str, Any], what: str) -> None:
    """Warn if the place in the data, counted in batches that ``there`` describes, is another one ``here``."""
    _warn(
        _different(_in_words(there), _in_words(here)),
        f"{what} was taken with other data or batches",
        "Training goes on, and its place is counted in the batches that there are now: of this epoch, rows may come twice or "
        "not at all. For the run that was stopped, resume with what it had.",
    )


def warn_of_another_schedule(there: Mapping[str, Any], here: Mapping[str, Any], what: str) -> None:
    """Warn if training has another length or schedule of its learning rate ``here`` than ``there``."""
    _warn(
        _different(_in_words(there), _in_words(here)),
        f"{what} was taken with another schedule",
        "From here on, length and learning rate are those of the present one, as with a checkpoint: neither the run that was "
        "stopped has them, nor one with this schedule from its beginning.",
    )


def _warn(different: str, found: str, then: str) -> None:
    if different:
        logger.warning("%s: %s. %s", found, different, then)


def _in_words(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: _short(value) for name, value in values.items() if value is not None}


def _different(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return ", ".join(f"{name} is {there.get(name, 'not')} there and {here.get(name, 'not')} here" for name in names)


def _short(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:20]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
