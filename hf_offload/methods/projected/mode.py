"""The memory modes galore, apollo and frugal: all weights, with the state of chosen matrices in a small space."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import nn

from hf_offload.methods.param_groups import WeightDecay, param_groups
from hf_offload.methods.projected import (
    ApolloConfig,
    FrugalConfig,
    GaLoreConfig,
    ProjectedAdamW,
    ProjectedConfig,
    UpdateInBackward,
)
from hf_offload.methods.projected import state_bytes as count_state
from hf_offload.methods.projected.checks import check_parameters
from hf_offload.methods.projected.projections import Projection, matrix_shape, projection_of
from hf_offload.methods.protocol import MemoryMode, conflicts_with_update_in_backward
from hf_offload.settings.classes import settings
from hf_offload.settings.values import Flag, names

if TYPE_CHECKING:
    from transformers import TrainingArguments

_SINGLE_BYTES = 4


@settings(frozen=True, kw_only=True)
class Projected(ProjectedConfig, MemoryMode):
    """A method of :mod:`hf_offload.methods.projected`, whose settings are those of the mode, too.

    Args:
        targets: Which matrices (:func:`~hf_offload.methods.param_groups.param_groups`).
        update_in_backward: Whether each weight is updated as soon as its gradient is there, so that gradients never add up.
    """

    targets: Annotated[str | Sequence[str], names("ends of module names", alone=("auto", "all"))] = "auto"
    update_in_backward: Flag = False

    def as_dict(self) -> dict[str, Any]:
        """The settings of the method: the mode's own do not decide about the state."""
        return {name: value for name, value in super().as_dict().items() if name not in _OWN}

    def optimizer(self, model: nn.Module, *, weight_decay: WeightDecay, **adam: Any) -> torch.optim.Optimizer:
        """:class:`ProjectedAdamW` over all trainable parameters."""
        groups = param_groups(model, targets=self.targets, weight_decay=weight_decay)
        return ProjectedAdamW(groups, self, **adam)  # each group has its weight decay

    def conflicts(self, args: "TrainingArguments") -> Iterator[str]:
        """What needs gradients after backward, where each is gone after its update."""
        if self.update_in_backward:
            yield from conflicts_with_update_in_backward(args)

    def begin_training(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Updates are made in backward from here on, if they are asked for."""
        if not self.update_in_backward:
            return super().begin_training(optimizer)
        assert isinstance(optimizer, ProjectedAdamW)
        return UpdateInBackward(optimizer).remove

    def updates_in_backward(self) -> bool:
        return self.update_in_backward

    def state_bytes(self, model: nn.Module) -> int:
        """The closed form, for each dtype of parameters there is."""
        shapes: dict[torch.dtype, tuple[list[tuple[int, int]], list[torch.Size]]] = {}
        checked: list[tuple[str, torch.Tensor, bool, Projection | None]] = []
        for group in param_groups(model, targets=self.targets):
            for name, parameter in group["params"]:
                projected, plain = shapes.setdefault(parameter.dtype, ([], []))
                if group["projected"]:
                    shape = matrix_shape(parameter, group["transposed"])
                    projected.append(shape)
                    checked.append((name, parameter, True, projection_of(self, shape)))
                else:
                    plain.append(parameter.shape)
        check_parameters(checked, self)
        return sum(count_state(*both, self, dtype) for dtype, both in shapes.items())

    def step_bytes(self, model: nn.Module, *, on_cpu: bool, fused: bool) -> int:
        """Of the weight that needs most: they are updated one after the other."""
        narrow = self.plain_state_dtype is not None
        most = 0
        for group in param_groups(model, targets=self.targets):
            for _, parameter in group["params"]:
                copies = parameter.nbytes  # of the step
                if group["projected"]:
                    copies += _SINGLE_BYTES * parameter.numel()  # of the gradient, for singular vectors
                elif narrow and parameter.dim() > 1:
                    copies = 5 * _SINGLE_BYTES * parameter.numel()  # gradient, moments, root and step
                most = max(most, copies)
        return most


_OWN = ("targets", "update_in_backward")


@settings(frozen=True, kw_only=True)
class Galore(GaLoreConfig, Projected):
    """GaLore."""


@settings(frozen=True, kw_only=True)
class Apollo(ApolloConfig, Projected):
    """APOLLO."""


@settings(frozen=True, kw_only=True)
class Frugal(FrugalConfig, Projected):
    """FRUGAL."""
