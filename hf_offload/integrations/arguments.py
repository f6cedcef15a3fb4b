"""Training arguments with offloading: flat fields that every parser, tracker and copy of the arguments understands."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_offload.errors import OffloadConfigError
from hf_offload.integrations.trainer import OffloadCallback, refuse_conflicts
from hf_offload.settings.classes import build, help_of
from hf_offload.settings.environment import FORMS
from hf_offload.settings.load import collect_errors
from hf_offload.settings.memory_modes import NONE
from hf_offload.settings.schema import FIELDS, OffloadConfig, argument

REPORT_NAME = "hf_offload"

# The Trainer builds its callbacks from the names in `report_to`: this is how the arguments alone switch offloading on.
INTEGRATION_TO_CALLBACK.setdefault(REPORT_NAME, OffloadCallback)


def _fields() -> Iterator[tuple[str, Any, Any]]:
    """What :class:`OffloadConfig` declares, as fields of a dataclass that every parser of arguments understands."""
    for field in dataclasses.fields(OffloadConfig):
        default = "none" if field.name == "tier" else field.default
        kind = FORMS[field.name].kind
        text = help_of(OffloadConfig, field.name, argument).replace("%", "%%")  # argparse fills in what follows a %
        yield (
            argument(field.name),
            kind | None if default is None else kind,
            dataclasses.field(default=default, metadata={"help": text}),
        )


_Declared: Any = dataclasses.make_dataclass("_Declared", _fields(), namespace={"__module__": __name__})


@dataclasses.dataclass
class OffloadArguments(_Declared):
    """Offloading as training arguments. Put it first among the bases of a dataclass of your own::

        @dataclass
        class MyArguments(OffloadArguments, SFTConfig): ...

    The fields are those of :class:`~hf_offload.OffloadConfig`, with ``offload_`` before the name where they are about moving
    tensors; ``tier`` is ``offload``, and ``"none"`` by default.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if TrainingArguments in cls.__mro__ and cls.__mro__.index(TrainingArguments) < cls.__mro__.index(
            OffloadArguments
        ):
            raise OffloadConfigError(
                f"{cls.__name__}: put OffloadArguments before the other arguments class, as in "
                f"`class {cls.__name__}(OffloadArguments, ...)`; behind it, its settings would be ignored."
            )

    def __post_init__(self) -> None:
        with collect_errors("training arguments") as check, check:
            config = self.offload_config()
            mode = config.mode()
        settings: Any = getattr(self, argument("memory_mode_kwargs"))
        if isinstance(settings, Mapping):  # every parser and tracker understands text
            setattr(self, argument("memory_mode_kwargs"), json.dumps(settings, default=os.fspath))
        parent = getattr(super(), "__post_init__", None)
        if parent is not None:
            parent()
        arguments: Any = self
        if isinstance(arguments, TrainingArguments):
            names = [name for name in arguments.report_to or () if name != REPORT_NAME]
            if config.without_mode().changes_a_run:
                refuse_conflicts(arguments)
            if config.changes_a_run:
                names.insert(0, REPORT_NAME)  # first, so that the other reporters see what it adds to the log
            arguments.report_to = names
            if mode is not None:
                from hf_offload.integrations.memory_modes import check_arguments

                check_arguments(mode, config, arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        is_mode = name == argument("memory_mode") and isinstance(value, str) and value != NONE
        names = vars(self).get("report_to")
        if is_mode and isinstance(names, list) and REPORT_NAME not in names:
            names.insert(0, REPORT_NAME)  # by which the Trainer finds the callback

    def _value(self, field: str) -> Any:
        value = getattr(self, argument(field))
        return FORMS[field].from_text(value) if isinstance(value, str) else value

    def offload_config(self) -> OffloadConfig:
        """The settings these arguments stand for. Raises :class:`~hf_offload.OffloadConfigError` for all errors at once."""
        return build(OffloadConfig, {field: self._value(field) for field in FIELDS}, "training arguments", argument)


@dataclasses.dataclass
class OffloadTrainingArguments(OffloadArguments, TrainingArguments):
    """:class:`~transformers.TrainingArguments` with offloading: ``OffloadTrainingArguments(..., offload="ssd")``."""


@dataclasses.dataclass
class OffloadSeq2SeqTrainingArguments(OffloadArguments, Seq2SeqTrainingArguments):
    """:class:`~transformers.Seq2SeqTrainingArguments` with offloading."""
