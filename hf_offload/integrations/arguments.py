"""Training arguments with offloading: flat fields that every parser, tracker and copy of the arguments understands."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_offload.errors import OffloadConfigError
from hf_offload.former_names import FormerName, add_former_name, called_from, warn_renamed
from hf_offload.integrations.trainer import OffloadCallback, refuse_conflicts
from hf_offload.settings.environment import FIELDS, READERS
from hf_offload.settings.load import collect_errors, naming
from hf_offload.settings.memory_modes import NONE
from hf_offload.settings.renamed import old_names, with_current_names
from hf_offload.settings.schema import OffloadConfig, argument
from hf_offload.settings.values import help_of

REPORT_NAME = "hf_offload"

_OLD = old_names([argument(field) for field in FIELDS])

# The Trainer builds its callbacks from the names in `report_to`: this is how the arguments alone switch offloading on.
INTEGRATION_TO_CALLBACK.setdefault(REPORT_NAME, OffloadCallback)


def _fields() -> Iterator[tuple[str, Any, Any]]:
    """What :class:`OffloadConfig` declares, as fields of a dataclass that every parser of arguments understands."""
    for field in dataclasses.fields(OffloadConfig):
        default = "none" if field.name == "tier" else field.default
        kind = READERS[field.name].kind
        text = help_of(OffloadConfig, field.name, argument).replace("%", "%%")  # argparse fills in what follows a %
        yield (
            argument(field.name),
            kind | None if default is None else kind,
            dataclasses.field(default=default, metadata={"help": text}),
        )
    for old, new in _OLD.items():
        # Neither shown nor compared: the new one is.
        yield (
            old,
            str | None,
            dataclasses.field(default=None, repr=False, compare=False, metadata={"help": f"Now {new}."}),
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
        with collect_errors("training arguments") as check:
            with check:
                self._take_old_names()
            with check:
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
                names.insert(0, REPORT_NAME)  # first, so that the other reporters see what it adds to the log
            arguments.report_to = names
            if mode is not None:
                from hf_offload.integrations.memory_modes import check_arguments

                check_arguments(mode, config, arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == argument("memory_mode") and isinstance(value, str) and value != NONE:
            _watch_trainers()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled or copied, perhaps in a process in which none were made."""
        self.__dict__.update(state)
        if state.get(argument("memory_mode"), NONE) != NONE:
            _watch_trainers()

    def _take_old_names(self) -> None:
        names = [argument(field) for field in FIELDS]
        old = {name: value for name in _OLD if (value := self.__dict__[name]) is not None}
        given = {name: value for name in names if (value := getattr(self, name)) is not getattr(type(self), name)}
        for name, value in with_current_names({**given, **old}, names).items():
            setattr(self, name, value)
        self.__dict__.update(dict.fromkeys(old))

    def _value(self, field: str) -> Any:
        value = getattr(self, argument(field))
        return READERS[field].from_text(value) if isinstance(value, str) else value

    def offload_config(self) -> OffloadConfig:
        """The settings these arguments stand for. Raises :class:`~hf_offload.OffloadConfigError` for all errors at once."""
        with naming(OffloadConfig, {field: argument(field) for field in FIELDS}):
            return OffloadConfig(**{field: self._value(field) for field in FIELDS})


class _FormerArgument(FormerName):
    """The former name of a training argument. As parsers have to know it, it is a field, too: what is given by it to the
    constructor is kept until ``__post_init__``, and code that lists all fields finds nothing there.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if called_from(_LIST_FIELDS):
            return None
        warn_renamed(self._former, self._now)
        return getattr(instance, self._now)

    def __set__(self, instance: Any, value: Any) -> None:  # called by OffloadArguments.__setattr__
        name = self._former.rpartition(".")[2]
        if name not in instance.__dict__:
            replaces = value is not None and called_from(["dataclasses"], stacklevel=4)  # as the new one is given, too
            instance.__dict__[name] = None if replaces else value
            if not replaces:
                return
        warn_renamed(self._former, self._now, stacklevel=3)
        setattr(instance, self._now, value)


_LIST_FIELDS = (dataclasses.__name__, TrainingArguments.__module__)
"""Modules whose code passes on the value of each field by its name: ``asdict``, ``replace``, ``to_dict``."""

for _old, _new in _OLD.items():
    add_former_name(OffloadArguments, _old, _FormerArgument(_new))


def _watch_trainers() -> None:
    from hf_offload.integrations.memory_modes import watch_trainers

    watch_trainers()


@dataclasses.dataclass
class OffloadTrainingArguments(OffloadArguments, TrainingArguments):
    """:class:`~transformers.TrainingArguments` with offloading: ``OffloadTrainingArguments(..., offload="ssd")``."""


@dataclasses.dataclass
class OffloadSeq2SeqTrainingArguments(OffloadArguments, Seq2SeqTrainingArguments):
    """:class:`~transformers.Seq2SeqTrainingArguments` with offloading."""
