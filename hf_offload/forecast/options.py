"""What a plan may be asked for in addition to a recipe, checked without torch, which takes seconds to import."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from hf_offload.settings.classes import Scope, explained_settings, forms
from hf_offload.settings.load import choose
from hf_offload.settings.recipes import DTYPE_ALIASES, DTYPES, TASKS
from hf_offload.settings.schema import TIER_ALIASES, TIERS, OffloadConfig
from hf_offload.settings.values import Reader, Text, Whole, one_of

AUTOCAST = ("no", "bfloat16", "float16")
DDP, FSDP2, ZERO2, ZERO3 = SHARDINGS = ("ddp", "fsdp2", "zero2", "zero3")

_SPELLINGS = "bfloat16 (bf16), float16 (fp16)"
_OF_DTYPE = f"Of the weights: {_SPELLINGS}, or float32 (fp32)."
_OF_AUTOCAST = f"Mixed precision: {_SPELLINGS}, or no."
_OF_TASK = f"A task ({', '.join(TASKS)}) or a class, such as ViTForImageClassification."
_OF_MODES = ("memory_mode", "memory_mode_kwargs")
PLANNED = (
    "memory_budget",
    "min_bytes",
    "max_step_write_bytes",
    "snapshot_steps",
    "snapshot_dir",
    *(name for name, form in forms(OffloadConfig).items() if form.scope is Scope.MODEL and name not in _OF_MODES),
)
"""Fields of :class:`~hf_offload.OffloadConfig` that a plan depends on, whatever the tier. Of memory modes, which are compared
with each other, :class:`WorkloadOptions` has options of its own.
"""


def _task(name: str, value: Any) -> Any:
    if not (isinstance(value, str) and value[:1].isupper()):  # only transformers knows its classes
        choose(name, value, TASKS)
    return value


@explained_settings(frozen=True, kw_only=True)
class WorkloadOptions:
    """What is planned, where it differs from what a recipe or a configuration says. None: as they say."""

    batch: Annotated[Whole | None, Field(ge=1)] = None
    """Rows of a micro-batch. Default: the recipe's, or 1."""
    sequence: Annotated[Whole | None, Field(ge=1)] = None
    """Tokens of a row, or samples of its audio. Default: the recipe's, or 2048 tokens, 10 seconds."""
    image_size: Annotated[Whole | None, Field(ge=1)] = None
    """Pixels of a side of an image. Default: as the model's configuration says."""
    dtype: Annotated[str | None, one_of(DTYPES, DTYPE_ALIASES), Field(description=_OF_DTYPE)] = None
    autocast: Annotated[str | None, one_of(AUTOCAST, DTYPE_ALIASES), Field(description=_OF_AUTOCAST)] = None
    task: Annotated[str | None, Reader(_task, {"type": "string"}), Field(description=_OF_TASK)] = None
    optimizer: Text | None = None
    """As in the Trainer's optim, such as adamw_torch."""
    state: Annotated[str | None, one_of(TIERS, TIER_ALIASES)] = None
    """Where gradients and optimizer state may be: auto (in memory if that is fastest), ram, ssd, or none for memory.
    Default: the recipe's, or auto."""
    weights: Annotated[str | None, one_of(TIERS, TIER_ALIASES)] = None
    """The same for weights that no operation uses. Default: the recipe's, or auto."""
    sharding: Annotated[str | None, one_of(SHARDINGS)] = None
    """How several GPUs share the model: ddp, fsdp2, zero2 or zero3. Default: ddp, a copy on each."""
    memory_mode: Text | None = None
    """As in the training arguments, such as lora or galore. Default: none, which trains all weights."""
    memory_mode_kwargs: Annotated[
        str | Mapping[str, Any] | None, Reader(lambda _name, value: value, {"type": "string"})
    ] = None
    """Settings of the memory mode in JSON, such as '{{"rank": 128}}'."""
