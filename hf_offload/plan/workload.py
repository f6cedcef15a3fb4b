"""What a plan is made for: a model, known from its configuration alone, and the batch it is trained on."""

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_offload.errors import OffloadConfigError, OffloadPlanError
from hf_offload.lean.apply import Lean
from hf_offload.memory_modes.registry import NONE, MemoryMode, read_settings
from hf_offload.memory_modes.registry import memory_mode as find_mode
from hf_offload.plan.counting import OptimizerNeeds, count_footprint, fake_mode
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.modes import begin_turn, mode_needs, prepare_without_data, updates_in_backward
from hf_offload.sampling.convert import Sampling
from hf_offload.settings.lean import LeanConfig
from hf_offload.settings.load import choose
from hf_offload.settings.recipe_files import recipe_names
from hf_offload.settings.recipes import DTYPES, TASKS, load_recipe
from hf_offload.settings.sampling import SampledLinearConfig
from hf_offload.settings.schema import OffloadConfig
from hf_offload.tiling.apply import Tiling, cut_for
from hf_offload.tiling.cut import Cut

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

DEFAULT_OPTIMIZER = "adamw_torch_fused"
"""The Trainer's."""

# Elements of state per trained weight in 32 bits; what quantises it says so in its name.
_STATE_ELEMENTS = {"adamw": 2.0, "sgd": 0.0, "adafactor": 0.01, "lion": 1.0, "adagrad": 1.0, "rmsprop": 1.0}
_STATE_SHARES = {"_4bit": 0.125, "_8bit": 0.25}
# Words before a name that change when state moves or how steps are averaged, not how much of it there is.
_PREFIXES = ("paged_", "schedule_free_", "stable_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and a batch.

    Attributes:
        name: As the user gave it.
        config: The model's configuration.
        task: ``causal-lm``, ``masked-lm``, ``seq2seq-lm`` or ``sequence-classification``.
        batch, sequence: Rows of a micro-batch and tokens of a row (for seq2seq of either side).
        target_sequence: For seq2seq: tokens of a row of labels, if not as many.
        dtype: Of the weights.
        autocast: Dtype of mixed precision, or None.
        attention: Attention implementation, or None for the model's own choice.
        optimizer: A name of the Trainer's ``optim``.
        min_offload_bytes: Smaller tensors stay in memory.
        weights: Parameters by dtype as found in a checkpoint, if one was read.
        memory_mode: One of :data:`~hf_offload.memory_modes.registry.MODES`; ``none`` trains every weight with ``optimizer``,
            the others have an optimizer of their own.
        memory_mode_kwargs: Settings of the mode.
        sampled: How linear layers are sampled, if they are.
        lean: What is not saved but made again, if anything.
        tiled_loss, tiled_mlp: What is computed a few tokens at a time.
        cut: How large pieces are.
        update_in_backward: Whether every weight is updated as soon as its gradient is there, so that gradients never add up.
        budget_bytes: The memory budget that a recipe names.
    """

    name: str
    config: "PretrainedConfig"
    task: str
    batch: int
    sequence: int
    dtype: torch.dtype
    target_sequence: int | None = None
    autocast: torch.dtype | None = None
    attention: str | None = None
    optimizer: str = DEFAULT_OPTIMIZER
    min_offload_bytes: int = 256 << 10
    weights: Mapping[str, int] | None = None
    memory_mode: str = NONE
    memory_mode_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sampled: SampledLinearConfig | None = None
    lean: LeanConfig | None = None
    tiled_loss: bool = False
    tiled_mlp: bool = False
    cut: Cut = dataclasses.field(default_factory=Cut)
    update_in_backward: bool = False
    budget_bytes: int | None = None

    @property
    def mode(self) -> MemoryMode | None:
        """The memory mode; None for all weights. Raises :class:`~hf_offload.errors.OffloadConfigError`."""
        return find_mode(self.memory_mode, self.memory_mode_kwargs)

    @property
    def fused(self) -> bool:
        """Whether one kernel makes the optimizer's update, with no copies between operations."""
        return self.optimizer.endswith("fused")

    def build(self) -> nn.Module:
        """The model in training mode. Called inside :func:`~hf_offload.plan.counting.fake_mode`."""
        options: dict[str, Any] = {"dtype": self.dtype}
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        try:
            model: nn.Module = auto_class(self.task).from_config(self.config, **options)
        except (TypeError, ValueError, ImportError) as error:
            raise OffloadConfigError(f"{self.name} cannot be built for {self.task}: {error}") from error
        mode = self.mode
        return (model if mode is None else prepare_without_data(mode, model)).train()

    def inputs(self) -> dict[str, torch.Tensor]:
        """A batch without padding."""
        tokens = torch.zeros(self.batch, self.sequence, dtype=torch.int64)
        shape: tuple[int, ...] = (self.batch, self.target_sequence or self.sequence)
        if self.task == "sequence-classification":
            shape = (self.batch,)
        return {"input_ids": tokens, "labels": torch.zeros(shape, dtype=torch.int64)}

    def in_mode(self, name: str, settings: str | Mapping[str, Any] | None = None) -> "Workload":
        """The same model in another memory mode.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for an unknown mode and for settings that it has not.
        """
        find_mode(name, settings)
        return dataclasses.replace(self, memory_mode=name, memory_mode_kwargs=read_settings(settings))

    def resized(self, batch: int, sequence: int) -> "Workload":
        """The same model on a batch of another shape."""
        return dataclasses.replace(self, batch=batch, sequence=sequence)


def auto_class(task: str) -> Any:
    """The class of transformers that builds a model for ``task``."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
    )

    return {
        "causal-lm": AutoModelForCausalLM,
        "masked-lm": AutoModelForMaskedLM,
        "seq2seq-lm": AutoModelForSeq2SeqLM,
        "sequence-classification": AutoModelForSequenceClassification,
    }[task]


def find_workload(
    source: str,
    overrides: Sequence[str] = (),
    *,
    batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    task: str | None = None,
    optimizer: str | None = None,
    memory_mode: str | None = None,
    memory_mode_kwargs: str | Mapping[str, Any] | None = None,
) -> Workload:
    """From a recipe, a folder with a ``config.json`` (with or without weights beside it) or a name of the hub.

    What is given replaces what the recipe says; without a recipe, batch 1 and 2048 tokens (or as many as the model takes).

    Raises :class:`~hf_offload.errors.OffloadConfigError`.
    """
    if dtype is not None:
        choose("dtype", dtype, DTYPES)
    if task is not None:
        choose("task", task, TASKS)
    for name, value in (("batch", batch), ("sequence", sequence)):
        if value is not None and value < 1:
            raise OffloadConfigError(f"{name}={value} is too small: give 1 or more.")
    preset = f"bench/{source}"
    folder = Path(source).expanduser()
    if folder.is_dir():
        found = _from_folder(source, folder)
    elif folder.suffix in (".yaml", ".yml") or source in recipe_names() or preset in recipe_names():
        found = _from_recipe(preset if preset in recipe_names() else source, overrides)
        overrides = ()
    else:
        found = _from_config(source, source)
    if overrides:
        raise OffloadConfigError(f"{overrides[0]!r} changes a recipe, but {source!r} is none: drop it.")
    changes: dict[str, Any] = {
        "batch": batch,
        "sequence": sequence,
        "dtype": None if dtype is None else getattr(torch, dtype),
        "task": task,
        "optimizer": optimizer,
    }
    found = dataclasses.replace(found, **{name: value for name, value in changes.items() if value is not None})
    if memory_mode is not None or memory_mode_kwargs is not None:
        found = found.in_mode(memory_mode or found.memory_mode, memory_mode_kwargs)
    if optimizer is not None and found.mode is not None:
        raise OffloadConfigError(
            f"optimizer={optimizer!r} and memory_mode={found.memory_mode!r} both choose the optimizer: drop one of them."
        )
    longest = getattr(found.config, "max_position_embeddings", None)
    if isinstance(longest, int) and found.sequence > longest:
        raise OffloadConfigError(f"sequence={found.sequence}, but {found.name} has {longest} positions: give fewer.")
    _state_elements(found.optimizer)
    return found


def _from_recipe(name: str, overrides: Sequence[str]) -> Workload:
    from transformers import AutoConfig

    recipe = load_recipe(name, overrides)
    model = recipe.model
    if model.name is not None and model.published is None:
        config = _config(model.name)
    else:
        architecture, fields = model.architecture, model.config
        if model.published is not None:
            architecture, fields = model.published.architecture, model.published.config
        values = {"bos_token_id": None, "eos_token_id": None, **fields}
        if recipe.data.train_bpe is not None:
            values.setdefault("vocab_size", recipe.data.train_bpe)
        config = AutoConfig.for_model(str(architecture), **values)
        if model.published is not None and hasattr(config, "use_cache"):
            config.use_cache = False  # as of one that comes from the hub
        if model.task == "seq2seq-lm" and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id
    training = recipe.training
    autocast = torch.bfloat16 if training.get("bf16") else torch.float16 if training.get("fp16") else None
    return Workload(
        name=recipe.name,
        config=config,
        task=model.task,
        batch=int(training.get("per_device_train_batch_size", 8)),
        sequence=recipe.data.sequence_length,
        target_sequence=recipe.data.target_length,
        dtype=getattr(torch, model.dtype),
        autocast=autocast,
        attention=model.attention,
        optimizer=str(training.get("optim", DEFAULT_OPTIMIZER)),
        min_offload_bytes=int(recipe.offload.min_offload_bytes),
        memory_mode=str(recipe.memory.get("mode", NONE)),
        memory_mode_kwargs={key: value for key, value in recipe.memory.items() if key != "mode"},
        sampled=recipe.offload.sampling,
        lean=recipe.offload.lean,
        tiled_loss=recipe.offload.tiled_loss != "off",
        tiled_mlp=recipe.offload.tiled_mlp not in ("off", "auto"),
        cut=cut_for(recipe.offload),
        budget_bytes=None if recipe.offload.memory_budget is None else int(recipe.offload.memory_budget),
    )


def _from_folder(name: str, folder: Path) -> Workload:
    if not (folder / "config.json").is_file():
        raise OffloadConfigError(f"{folder} has no config.json: name the folder of a model or of a checkpoint.")
    found = _from_config(name, str(folder))
    files = sorted(folder.glob("*.safetensors"))
    weights: dict[str, int] = {}
    for file in files:
        for dtype, count in _header_counts(file).items():
            weights[dtype] = weights.get(dtype, 0) + count
    if not weights:
        return found
    main = max(weights, key=weights.__getitem__)
    if main not in _SAFETENSORS_DTYPES:
        raise OffloadConfigError(
            f"{folder}: most weights are stored as {main}, which is not a dtype to train in: give --dtype."
        )
    return dataclasses.replace(found, dtype=getattr(torch, _SAFETENSORS_DTYPES[main]), weights=weights)


def _header_counts(file: Path) -> dict[str, int]:
    """Elements per dtype, from a safetensors file's header: an 8-byte length, then JSON."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(file.stat().st_size, 1 << 30):
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        counts: dict[str, int] = {}
        for key, entry in header.items():
            if key != "__metadata__":
                elements = 1
                for size in entry["shape"]:
                    elements *= size
                counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + elements
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise OffloadConfigError(f"{file} is not a whole safetensors file: {error}.") from error
    return counts


def _from_config(name: str, source: str) -> Workload:
    config = _config(source)
    architecture = next(iter(getattr(config, "architectures", None) or ()), "")
    if getattr(config, "is_encoder_decoder", False):
        task = "seq2seq-lm"
    elif architecture.endswith(("ForMaskedLM", "ForPreTraining")):
        task = "masked-lm"
    else:
        task = "causal-lm"
    longest = getattr(config, "max_position_embeddings", None)
    dtype = getattr(config, "dtype", None)
    return Workload(
        name=name,
        config=config,
        task=task,
        batch=1,
        sequence=min(2048, longest) if isinstance(longest, int) else 2048,
        dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32,
    )


def _config(source: str) -> "PretrainedConfig":
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        recipes = ", ".join(recipe_names())
        first = str(error).splitlines()[0]
        raise OffloadConfigError(
            f"{source!r} is no shipped recipe, no folder with a config.json, and no model the hub gives here: {first} "
            f"Recipes: {recipes}."
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _state_elements(optimizer: str) -> float:
    name = optimizer
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for known, elements in _STATE_ELEMENTS.items():
        if name == known or name.startswith(f"{known}_"):
            shares = (share for ending, share in _STATE_SHARES.items() if name.endswith(ending))
            return elements * next(shares, 1.0)
    raise OffloadConfigError(
        f"What the optimizer {optimizer!r} holds in memory is not known: known are {', '.join(_STATE_ELEMENTS)} and their "
        "variants."
    )


def optimizer_needs(workload: Workload, model: nn.Module, hardware: Hardware) -> OptimizerNeeds:
    """Memory and time of the optimizer's step, from the number and dtype of the weights."""
    mode = workload.mode
    if mode is not None:
        return mode_needs(mode, model, hardware, workload.fused)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in trainable)
    state = round(weights * _state_elements(workload.optimizer))
    if workload.fused or not state:
        extra = 0
    elif hardware.device == "cpu" or workload.update_in_backward:
        # One weight after the other, each with a copy of its size.
        extra = max((parameter.numel() * parameter.element_size() for parameter in trainable), default=0)
    else:
        extra = weights  # all at once (foreach)
    moved = 3 * weights + 2 * state
    return OptimizerNeeds(state, extra, moved / hardware.memory_bytes_per_s.value)


def count_workload(workload: Workload, hardware: Hardware) -> Footprint:
    """The footprint of one step on ``hardware``. No weights, no device.

    Raises :class:`~hf_offload.errors.OffloadPlanError` if the model cannot be counted.
    """
    try:
        with fake_mode():
            model = workload.build()
            batch = workload.inputs()
            sampling = Sampling(model, workload.sampled)
            sampling.apply()
            tiled = _tile(workload, model)
            Lean(model, workload.lean).apply()
    except OffloadConfigError:
        raise
    except Exception as error:  # a constructor that needs data fails in a way of its own
        raise OffloadPlanError(
            f"{workload.name} cannot be built without data ({type(error).__name__}: {error}). Its plan has to come from a "
            "measured step: train with offload='auto'."
        ) from error
    needs = optimizer_needs(workload, model, hardware)
    mode = workload.mode
    if mode is not None:
        begin_turn(mode, model)
    footprint = count_footprint(
        model,
        batch,
        cost=hardware.seconds,
        optimizer=needs,
        min_offload_bytes=workload.min_offload_bytes,
        as_on_cuda=hardware.device != "cpu",
        autocast=workload.autocast,
        update_in_backward=workload.update_in_backward or updates_in_backward(mode),
    )
    return dataclasses.replace(footprint, tiled=tuple(tiled), sampled=sampling.names)


def _tile(workload: Workload, model: nn.Module) -> list[str]:
    """Cut the model as the workload says; the names of what is cut."""
    switches = {True: "on", False: "off"}
    config = OffloadConfig(
        tier="none", tiled_loss=switches[workload.tiled_loss], tiled_mlp=switches[workload.tiled_mlp]
    )
    tiling = Tiling(model, config, workload.cut)
    tiling.apply()
    return tiling.names
