"""What a plan is made for: a model, known from its configuration alone, and the batch it is trained on."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_offload.errors import OffloadConfigError, OffloadPlanError
from hf_offload.forecast.counting import count_footprint
from hf_offload.forecast.fake import fake_mode
from hf_offload.forecast.options import DDP
from hf_offload.forecast.repeats import count_repeats
from hf_offload.forecast.workload_inputs import describe_batch, length_unit, longest_row, make_batch
from hf_offload.methods.protocol import MemoryMode, OptimizerBytes
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware
from hf_offload.plan.state_placement import Allowed
from hf_offload.settings.memory_modes import NONE, read_mode_settings
from hf_offload.settings.memory_modes import memory_mode as find_mode
from hf_offload.settings.schema import OffloadConfig, with_checked
from hf_offload.settings.shown import cropped
from hf_offload.settings.text_files import reason_of
from hf_offload.structure.units import find_blocks
from hf_offload.transforms.order import Transforms, transforms_for
from hf_offload.transforms.rematerialization.apply import ElementwiseBlocks
from hf_offload.transforms.tiling.cut import Cut

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_OPTIMIZER = "adamw_torch_fused"
"""The Trainer's."""

# Elements of state per trained weight in 32 bits; what quantises it says so in its name.
_STATE_ELEMENTS = {"adamw": 2.0, "sgd": 0.0, "adafactor": 0.01, "lion": 1.0, "adagrad": 1.0, "rmsprop": 1.0}
_STATE_SHARES = {"_4bit": 0.125, "_8bit": 0.25}
# Words before a name that change when state moves or how steps are averaged, not how much of it there is.
_PREFIXES = ("paged_", "schedule_free_", "stable_")


_STREAMED_MODES = (NONE, "lora", "dora", "qlora")
"""Memory modes with an optimizer that steps one weight at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and a batch.

    Attributes:
        name: As the user gave it.
        config: The model's configuration.
        task: ``causal-lm``, ``masked-lm``, ``seq2seq-lm``, ``sequence-classification``, or a model's class in transformers,
            such as ``ViTForImageClassification``.
        batch, sequence: Rows of a micro-batch and tokens of a row (for seq2seq of either side), or samples of its audio.
        target_sequence: For seq2seq: tokens of a row of labels, if not as many.
        image_size: Pixels of a side of an image, if not what the configuration says.
        dtype: Of the weights.
        autocast: Dtype of mixed precision, or None.
        attention: Attention implementation, or None for the model's own choice.
        optimizer: A name of the Trainer's ``optim``.
        memory_mode: ``none`` trains every weight with ``optimizer``; the others have an optimizer of their own.
        memory_mode_kwargs: Settings of the mode.
        settings: Of the run, but for its tier: a plan is about all of them.
        cut: How large pieces are, if not as the settings say.
        update_in_backward: Whether every weight is updated as soon as its gradient is there, so that gradients never add up.
        state_place, weights_place: Where gradients and optimizer state, and weights, may be: ``none`` (in memory), ``ram``,
            ``ssd`` or ``auto``.
        names_drive: Whether a recipe's settings name a drive.
        sharding: How several GPUs share the model: one of ``SHARDINGS``.
    """

    name: str
    config: "PretrainedConfig"
    task: str
    batch: int
    sequence: int
    dtype: torch.dtype
    target_sequence: int | None = None
    image_size: int | None = None
    autocast: torch.dtype | None = None
    attention: str | None = None
    optimizer: str = DEFAULT_OPTIMIZER
    memory_mode: str = NONE
    memory_mode_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: OffloadConfig = dataclasses.field(default_factory=OffloadConfig)
    cut: Cut | None = None
    update_in_backward: bool = False
    state_place: str = "auto"
    weights_place: str = "auto"
    names_drive: bool = False
    sharding: str = DDP

    @property
    def mode(self) -> MemoryMode | None:
        """The memory mode; None for all weights. Raises :class:`~hf_offload.errors.OffloadConfigError`."""
        return find_mode(self.memory_mode, self.memory_mode_kwargs)

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget that the settings name."""
        return None if self.settings.memory_budget is None else int(self.settings.memory_budget)

    @property
    def fused(self) -> bool:
        """Whether one kernel makes the optimizer's update, with no copies between operations."""
        return self.optimizer.endswith("fused")

    def build(self) -> nn.Module:
        """The model in training mode. Called inside :func:`~hf_offload.forecast.fake.fake_mode`."""
        options: dict[str, Any] = {"dtype": self.dtype}
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        from transformers.initialization import no_init_weights

        try:
            with no_init_weights():  # some draw until a value suits them
                model = self.model_class._from_config(self.config, **options)
            model.tie_weights()  # which is a part of drawing them
        except (TypeError, ValueError, ImportError) as error:
            raise OffloadConfigError(f"{self.name} cannot be built for {self.task}: {reason_of(error)}") from error
        mode = self.mode
        return (model if mode is None else mode.prepare_fake(model)).train()

    def inputs(self, model: nn.Module) -> dict[str, Any]:
        """A batch without padding for ``model``, as :meth:`build` gave it."""
        get_base: Any = getattr(model, "get_base_model", lambda: model)  # peft's
        return make_batch(get_base(), self.batch, self.sequence, self.target_sequence, self.image_size)

    @property
    def model_class(self) -> Any:
        """The class of transformers."""
        return class_for(self.task, self.config)

    @property
    def shape(self) -> str:
        """The batch in words."""
        return describe_batch(self.model_class, self.config, self.batch, self.sequence, self.image_size)

    @property
    def length_unit(self) -> str:
        """What ``sequence`` counts; empty where a row has no length."""
        return length_unit(self.model_class, self.config)

    @property
    def longest(self) -> int | None:
        """The longest row that the model takes, if it says so."""
        return longest_row(self.model_class, self.config)

    def in_mode(self, name: str, settings: str | Mapping[str, Any] | None = None) -> "Workload":
        """The same model in another memory mode.

        Raises :class:`~hf_offload.errors.OffloadConfigError` for an unknown mode and for settings that it has not.
        """
        find_mode(name, settings)
        return dataclasses.replace(self, memory_mode=name, memory_mode_kwargs=read_mode_settings(settings))

    @property
    def allowed(self) -> Allowed:
        """What a plan may do with weights, gradients and state. Optimizers of memory modes have their own way."""
        limit = self.settings.max_step_write_bytes
        written = None if limit is None else int(limit)
        if self.mode is not None and not self.mode.uses_gradients:
            return Allowed("none", self.weights_place, written_bytes=written)
        if self.memory_mode not in _STREAMED_MODES:
            return Allowed("none", "none", written_bytes=written)
        return Allowed(self.state_place, self.weights_place, self.settings.update_in_backward, written_bytes=written)

    def changed(self, **changes: Any) -> "Workload":
        """The same with other attributes, or with other settings of the run, which were read before."""
        names = {field.name for field in dataclasses.fields(self)}
        settings = with_checked(self.settings, **{name: changes.pop(name) for name in changes.keys() - names})
        return dataclasses.replace(self, **changes, settings=settings)


def class_for(task: str, config: "PretrainedConfig") -> Any:
    """The class of transformers that a model for ``task`` has.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if there is none.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    mappings = {
        "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
        "seq2seq-lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "sequence-classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    }
    if task not in mappings:
        return getattr(transformers, task)
    try:
        found = mappings[task][type(config)]
    except KeyError as error:
        raise OffloadConfigError(f"transformers has no model of type {config.model_type!r} for {task}.") from error
    return found[0] if isinstance(found, tuple) else found


def state_elements(optimizer: str) -> float:
    """Elements that an optimizer of the Trainer keeps for each trained weight, counted in the weight's size.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for one that is not known.
    """
    name = optimizer
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for known, elements in _STATE_ELEMENTS.items():
        if name == known or name.startswith(f"{known}_"):
            shares = (share for ending, share in _STATE_SHARES.items() if name.endswith(ending))
            return elements * next(shares, 1.0)
    raise OffloadConfigError(
        f"The state of the optimizer {optimizer!r} is not known. Known are {', '.join(_STATE_ELEMENTS)} and their variants."
    )


def optimizer_bytes(workload: Workload, model: nn.Module, hardware: Hardware) -> OptimizerBytes:
    """What the optimizer needs, from the number and dtype of the weights."""
    mode = workload.mode
    if mode is not None:
        return mode.optimizer_bytes(model, on_cpu=hardware.device == "cpu", fused=workload.fused)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in trainable)
    state = round(weights * state_elements(workload.optimizer))
    if workload.fused or not state:
        extra = 0
    elif hardware.device == "cpu" or workload.update_in_backward:
        # One weight after the other, each with a copy of its size.
        extra = max((parameter.numel() * parameter.element_size() for parameter in trainable), default=0)
    else:
        extra = weights  # all at once (foreach)
    return OptimizerBytes(state, extra, 3 * weights + 2 * state)


def count_workload(workload: Workload, hardware: Hardware) -> Footprint:
    """The footprint of one step on ``hardware``. No weights, no device.

    Raises :class:`~hf_offload.errors.OffloadPlanError` if the model cannot be counted.
    """
    return _count(workload, hardware, in_blocks=False)


def count_choices(workload: Workload, hardware: Hardware) -> Footprint:
    """The same, and the step in which all blocks recompute their elementwise operations, where a plan may choose that."""
    footprint = _count(workload, hardware, in_blocks=False)
    mode = workload.mode
    uses_gradients = mode is None or mode.uses_gradients
    if not workload.settings.plans_elementwise or not uses_gradients:
        return footprint
    return dataclasses.replace(footprint, elementwise=_count(workload, hardware, in_blocks=True))


def _count(workload: Workload, hardware: Hardware, in_blocks: bool) -> Footprint:
    transforms, asked = _step_of(workload, hardware, in_blocks)
    footprint = count_repeats(**asked) if asked["has_backward"] else count_footprint(**asked)
    if footprint is None:
        transforms, asked = _step_of(workload, hardware, in_blocks)
        footprint = count_footprint(**asked)
    return dataclasses.replace(footprint, tiled=transforms.tiling.names, sampled=transforms.sampling.names)


def _step_of(workload: Workload, hardware: Hardware, in_blocks: bool) -> tuple[Transforms, dict[str, Any]]:
    """What is counted, and how: arguments of :func:`~hf_offload.forecast.counting.count_footprint`. ``in_blocks``, all blocks
    recompute their elementwise operations.
    """
    try:
        with fake_mode():
            model = workload.build()
            batch = workload.inputs(model)
            transforms = transforms_for(model, workload.settings, workload.cut)
            transforms.apply()
            if in_blocks:
                ElementwiseBlocks(find_blocks(model)).apply(True)
    except OffloadConfigError:
        raise
    except Exception as error:  # a constructor that needs data fails in a way of its own
        raise OffloadPlanError(
            f"{workload.name} cannot be built without data ({type(error).__name__}: {cropped(str(error))}). Its plan has to "
            "come from a measured step: train with offload='auto'."
        ) from error
    needs = optimizer_bytes(workload, model, hardware)
    mode = workload.mode
    for parameter in () if mode is None else mode.waiting(model):
        parameter.requires_grad_(False)
    return transforms, {
        "model": model,
        "batch": batch,
        "cost": hardware.seconds,
        "optimizer": needs,
        "min_bytes": workload.settings.smallest_bytes(hardware.device == "cpu"),
        "as_on_cuda": hardware.device != "cpu",
        "autocast": workload.autocast,
        "update_in_backward": workload.update_in_backward or (mode is not None and mode.updates_in_backward()),
        "has_backward": mode is None or mode.uses_gradients,
    }
