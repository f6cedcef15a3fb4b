"""Training arguments with offloading: flat fields that every parser, tracker and copy of the arguments understands."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_offload.errors import OffloadConfigError
from hf_offload.integrations.trainer import OffloadCallback, refuse_conflicts
from hf_offload.settings.load import collect_errors, renaming
from hf_offload.settings.memory_modes import MODES
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.values import folders, optional

if TYPE_CHECKING:
    from hf_offload.memory_modes.protocol import MemoryMode

REPORT_NAME = "hf_offload"

ARGUMENTS = {
    "tier": "offload",
    "directory": "offload_dir",
    "memory_budget": "offload_memory_budget",
    "ram_budget": "offload_ram_budget",
    "disk_budget": "offload_disk_budget",
    "min_offload_bytes": "offload_min_bytes",
    "keep_last_count": "offload_keep_last_count",
    "read_ahead_bytes": "offload_read_ahead",
    "verify": "offload_verify",
    "max_disk_write_bytes": "offload_max_disk_write",
    "at_disk_write_limit": "offload_at_disk_write_limit",
    "disk_rated_bytes": "offload_disk_rated",
}
"""Settings that go by another name among training arguments."""

# The Trainer builds its callbacks from the names in `report_to`: this is how the arguments alone switch offloading on.
INTEGRATION_TO_CALLBACK.setdefault(REPORT_NAME, OffloadCallback)


@dataclasses.dataclass
class OffloadArguments:
    """Offloading as training arguments. Put it first among the bases of a dataclass of your own::

        @dataclass
        class MyArguments(OffloadArguments, SFTConfig): ...

    The fields are those of :class:`~hf_offload.OffloadConfig`, where they are explained.
    """

    offload: str = dataclasses.field(
        default="none",
        metadata={"help": "Where saved activations go: none, ram or ssd (also cpu, disk, nvme), or auto."},
    )
    offload_memory_budget: str | None = dataclasses.field(
        default=None, metadata={"help": "With offload=auto: most memory of the device, weights and all, e.g. 20GiB."}
    )
    offload_dir: str | None = dataclasses.field(
        default=None, metadata={"help": "Directory for offload=ssd or auto; several, separated by commas, are striped."}
    )
    offload_ram_budget: str | None = dataclasses.field(
        default=None, metadata={"help": "Most RAM to use, e.g. 20GiB. With offload=ssd, RAM is filled first."}
    )
    offload_disk_budget: str | None = dataclasses.field(
        default=None, metadata={"help": "Most disk space to use, e.g. 200GiB."}
    )
    offload_min_bytes: str | None = dataclasses.field(
        default=None, metadata={"help": "Smaller tensors stay in memory. Default: 256KiB on a CPU, 2MiB on a GPU."}
    )
    offload_keep_last_count: int = dataclasses.field(
        default=0, metadata={"help": "How many of the last blocks keep their activations in memory."}
    )
    offload_read_ahead: str | None = dataclasses.field(
        default=None, metadata={"help": "How many bytes backward reads ahead. Default: six tensors of usual size."}
    )
    offload_verify: str = dataclasses.field(
        default="off", metadata={"help": "off, or checksum: compare every buffer before the store and after the load."}
    )
    offload_max_disk_write: str | None = dataclasses.field(
        default=None, metadata={"help": "Stop writing to disk after this many bytes in one run, e.g. 10TiB."}
    )
    offload_at_disk_write_limit: str = dataclasses.field(
        default="keep",
        metadata={
            "help": "What follows that limit: keep (activations stay in memory) or stop (save, and end the run)."
        },
    )
    offload_disk_rated: str | None = dataclasses.field(
        default=None,
        metadata={"help": "What the drive can take in its life (TBW), e.g. 600TB: the summary says what is used up."},
    )

    tiled_loss: str = dataclasses.field(
        default="off",
        metadata={"help": "Output head and loss a few tokens at a time, without logits: auto, on or off."},
    )
    tiled_mlp: str = dataclasses.field(
        default="off",
        metadata={"help": "MLPs a few tokens at a time: auto, on, off, or names of modules, separated by commas."},
    )
    tile_bytes: str | None = dataclasses.field(
        default=None, metadata={"help": "Size of the logits of one piece, e.g. 128MiB. Default: a sixteenth of all."}
    )

    sampled_linear: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "Estimate weight gradients from a part of the inputs of linear layers: 0.3, or settings in JSON."
        },
    )

    lean_activations: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "Make tensors again instead of saving them: activations, norms, dropout (exact: all three), "
            "derivative-8bit; separated by commas."
        },
    )

    memory_mode: str = dataclasses.field(
        default="none",
        metadata={
            "help": f"What is trained and what the optimizer keeps of it: {', '.join(MODES)}, or none for all weights and "
            "AdamW."
        },
    )
    memory_mode_kwargs: str | None = dataclasses.field(
        default=None, metadata={"help": "Settings of the memory mode in JSON, such as the rank."}
    )

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
                config = self.offload_config()
            with check:
                mode = self.chosen_memory_mode()
        settings: Any = self.memory_mode_kwargs
        if isinstance(settings, Mapping):
            self.memory_mode_kwargs = json.dumps(
                settings, default=os.fspath
            )  # which every parser and tracker understands
        parent = getattr(super(), "__post_init__", None)
        if parent is not None:
            parent()
        arguments: Any = self
        if isinstance(arguments, TrainingArguments):
            names = [name for name in arguments.report_to or () if name != REPORT_NAME]
            if config.changes_a_run:
                refuse_conflicts(arguments)
                names.insert(0, REPORT_NAME)  # first, so that the other reporters see what it adds to the log
            arguments.report_to = names
            if mode is not None:
                from hf_offload.integrations.memory_modes import check_arguments, watch_trainers

                check_arguments(mode, arguments)
                watch_trainers()

    def chosen_memory_mode(self) -> "MemoryMode | None":
        """The memory mode these arguments stand for. Raises :class:`~hf_offload.OffloadConfigError` for all mistakes."""
        if isinstance(self.memory_mode, str) and self.memory_mode == "none" and self.memory_mode_kwargs is None:
            return None
        from hf_offload.memory_modes.registry import memory_mode  # only whoever asks for a mode has to load it

        directories = optional(folders())("offload_dir", self._directories())
        return memory_mode(self.memory_mode, self.memory_mode_kwargs, directories or ())

    def _directories(self) -> Any:
        given: Any = self.offload_dir
        if isinstance(given, str):
            given = [part.strip() for part in given.split(",") if part.strip()]
        return None if isinstance(given, list) and not given else given

    def offload_config(self) -> OffloadConfig:
        """The settings these arguments stand for. Raises :class:`~hf_offload.OffloadConfigError` for all mistakes at once."""
        with renaming("training arguments", ARGUMENTS):
            return OffloadConfig(
                tier=self.offload,
                memory_budget=self.offload_memory_budget,
                directory=self._directories(),
                ram_budget=self.offload_ram_budget,
                disk_budget=self.offload_disk_budget,
                min_offload_bytes=self.offload_min_bytes,
                keep_last_count=self.offload_keep_last_count,
                read_ahead_bytes=self.offload_read_ahead,
                verify=self.offload_verify,
                max_disk_write_bytes=self.offload_max_disk_write,
                at_disk_write_limit=self.offload_at_disk_write_limit,
                disk_rated_bytes=self.offload_disk_rated,
                tiled_loss=self.tiled_loss,
                tiled_mlp=self.tiled_mlp,
                tile_bytes=self.tile_bytes,
                sampled_linear=self.sampled_linear,
                lean_activations=self.lean_activations,
            )


@dataclasses.dataclass
class OffloadTrainingArguments(OffloadArguments, TrainingArguments):
    """:class:`~transformers.TrainingArguments` with offloading: ``OffloadTrainingArguments(..., offload="ssd")``."""

    def __post_init__(self) -> None:
        super().__post_init__()


@dataclasses.dataclass
class OffloadSeq2SeqTrainingArguments(OffloadArguments, Seq2SeqTrainingArguments):
    """:class:`~transformers.Seq2SeqTrainingArguments` with offloading."""

    def __post_init__(self) -> None:
        super().__post_init__()
