"""The interface of memory modes: everything that the Trainer, a plan and a model card need of one."""

import abc
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.classes import settings
from hf_offload.settings.schema import OffloadConfig

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from hf_offload.methods.param_groups import WeightDecay


@dataclasses.dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer needs.

    Attributes:
        state: Bytes that stay.
        step: Bytes that are there during a step only.
        moved: Bytes that a step reads and writes.
        gradients: Most bytes of gradients, where other weights than those of the counted step may have more.
        buffers: Bytes that are there while losses are computed, too, and not between steps.
    """

    state: int
    step: int
    moved: int
    gradients: int = 0
    buffers: int = 0


@settings(frozen=True, kw_only=True)
class MemoryMode(abc.ABC):
    """What is trained, and with which optimizer. A mode is a settings class
    (:mod:`hf_offload.settings.classes`). It has to define its optimizer and how much state that holds.

    Attributes:
        takes_fused: The optimizer has the option ``fused`` of ``torch.optim.AdamW``.
        uses_gradients: There is a backward. Without one, nothing is saved, and the optimizer's step takes a closure.
        replaces: Optimizers of scripts that the mode's takes the place of.
    """

    takes_fused: ClassVar[bool] = False
    uses_gradients: ClassVar[bool] = True
    replaces: ClassVar[tuple[type[torch.optim.Optimizer], ...]] = (torch.optim.AdamW, torch.optim.Adam)

    @classmethod
    def setting_names(cls) -> list[str]:
        """What ``memory_mode_kwargs`` may hold."""
        return [field.name for field in dataclasses.fields(cls)]

    # -- model and optimizer --------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model that is trained. Raises :class:`~hf_offload.errors.OffloadConfigError` where it cannot be."""
        return model

    def prepare_in_place(self, model: nn.Module) -> None:
        """:meth:`prepare` for a ``model`` that a script goes on to use. Raises likewise, and where that cannot be."""
        if self.prepare(model) is not model:
            raise OffloadConfigError(
                f"{type(self).__name__} makes another model, which a script would not train: use the Trainer with "
                "OffloadTrainingArguments, or hf_offload.memory_mode() in a loop of your own."
            )

    @abc.abstractmethod
    def optimizer(self, model: nn.Module, *, weight_decay: "WeightDecay", **adam: Any) -> torch.optim.Optimizer:
        """The optimizer of a prepared ``model``; ``adam`` is ``lr``, ``betas``, ``eps`` and perhaps ``fused``. Raises as
        :meth:`prepare`.

        Where an optimizer takes the place of one that a script has made, ``weight_decay`` says what each parameter had there
        (:data:`~hf_offload.methods.param_groups.WeightDecay`): the groups of
        :func:`~hf_offload.methods.param_groups.decay_groups` have it.
        """

    # -- training -------------------------------------------------------------------------------------------------------

    def conflicts(self, args: "TrainingArguments") -> Iterable[str]:
        """Why this mode and ``args`` exclude each other, beyond what holds for every mode: one sentence for each reason."""
        return ()

    def conflicts_with(self, config: OffloadConfig) -> Iterable[str]:
        """Why this mode and other settings exclude each other: one sentence for each reason."""
        return ()

    def begin_training(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Called when a training with this mode's ``optimizer`` begins or goes on; what it returns is called at the end."""
        return lambda: None

    def save_beside(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:  # noqa: B027
        """Add to a checkpoint that the Trainer has written to ``folder`` what is of use without the optimizer."""

    # -- plans: models of fake tensors, no data -------------------------------------------------------------------------

    def prepare_fake(self, model: nn.Module) -> nn.Module:
        """What :meth:`prepare` would return, for a ``model`` of fake tensors. Raises likewise."""
        return self.prepare(model)

    def waiting(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """What does not train in the step that saves most for backward, where not all weights train in every step."""
        return ()

    def updates_in_backward(self) -> bool:
        """Whether each weight is updated as soon as its gradient is there, so that gradients never add up."""
        return False

    @abc.abstractmethod
    def state_bytes(self, model: nn.Module) -> int:
        """Most bytes of the optimizer's state for a prepared ``model``, from its shapes. Raises as :meth:`optimizer`."""

    def step_bytes(self, model: nn.Module, *, on_cpu: bool, fused: bool) -> int:
        """Bytes that the optimizer's step allocates. Here those of ``torch.optim.AdamW``: none with ``fused``, a copy of one
        weight after the other on a CPU, and of all at once (foreach) elsewhere.
        """
        if fused and self.takes_fused:
            return 0
        sizes = [one.nbytes for one in trained_parameters(model)]
        return max(sizes, default=0) if on_cpu else sum(sizes)

    def optimizer_bytes(self, model: nn.Module, *, on_cpu: bool, fused: bool) -> OptimizerBytes:
        """What the optimizer needs for a prepared ``model`` that is trained ``on_cpu``, or on an accelerator.

        A step reads and writes weights, gradients and state: projecting gradients, and the singular vectors that are computed
        now and then, are not counted.
        """
        state = self.state_bytes(model)
        weights = sum(one.nbytes for one in trained_parameters(model))
        return OptimizerBytes(state, self.step_bytes(model, on_cpu=on_cpu, fused=fused), 3 * weights + 2 * state)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def conflicts_with_update_in_backward(args: "TrainingArguments") -> Iterator[str]:
    """What needs gradients after backward, where each is gone after its update."""
    for name, usual, why in (
        ("max_grad_norm", 0, "all gradients at once"),
        ("gradient_accumulation_steps", 1, "them to stay"),
    ):
        value = getattr(args, name)
        if value is not None and value > usual:
            yield (
                f"{name}={value} needs {why}, and with update_in_backward each gradient is gone as soon as it was used: "
                f"set {name}={usual}, or drop update_in_backward."
            )
    if args.fp16:
        yield (
            "fp16=True scales the loss and looks at all gradients before a step, and with update_in_backward they are "
            "gone by then: set bf16=True, or drop update_in_backward."
        )


def load_library(name: str, mode: str, install: str) -> Any:
    """The module ``name``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` with what to ``install`` for ``mode`` if it is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise OffloadConfigError(f"memory_mode={mode!r} needs {package}: pip install {install}.") from error
