"""Memory modes on tensors without data: the model that would be trained, and what its optimizer would need."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_offload.forecast.counting import OptimizerNeeds
from hf_offload.memory_modes.adapters import AdapterConfig, LoraFaConfig, QloraConfig
from hf_offload.memory_modes.quantised import AdamW4bitConfig, AdamW8bitConfig
from hf_offload.memory_modes.registry import Blockwise, MemoryMode, Projected
from hf_offload.optimizers.blockwise import deepest_turn, peak_bytes
from hf_offload.optimizers.blockwise.freezing import freeze
from hf_offload.optimizers.param_groups import param_groups
from hf_offload.plan.hardware import Hardware
from hf_offload.structure.linears import chosen_linears

_SINGLE_BYTES = 4


def prepare_without_data(mode: MemoryMode, model: nn.Module) -> nn.Module:
    """What ``mode.prepare`` makes of ``model``, in :func:`~hf_offload.forecast.counting.fake_mode`.

    Adapters are made by the mode itself. Weights in 4 bits are not: layers that compute as bitsandbytes does stand in for its
    own, which quantise where they are made, and hold what
    :meth:`~hf_offload.memory_modes.adapters.QloraConfig.weight_bytes` says.

    Raises :class:`~hf_offload.errors.OffloadConfigError` as ``prepare`` does.
    """
    if not isinstance(mode, AdapterConfig):
        return mode.prepare(model)
    layers: set[Any] = set()
    maker = mode
    if isinstance(mode, QloraConfig):
        chosen = chosen_linears(model, mode.targets)
        mode.check_layers(chosen)
        layers.update(chosen.values())
        maker = AdapterConfig(rank=mode.rank, alpha=mode.alpha, dropout=mode.dropout, targets=mode.targets)
    with unset_fake_temporarily():
        # peft moves adapters with Module.to, which fake tensors cannot do: it is given a model on the meta device.
        _put_on(model, "meta")
        adapted = maker.prepare(model, low_cpu_mem_usage=True)
    _put_on(adapted, "cpu")
    if isinstance(mode, QloraConfig):
        for module in list(adapted.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and child in layers:
                    setattr(module, name, FourBitLinear(child, mode))
    return adapted


def begin_turn(mode: MemoryMode, model: nn.Module) -> None:
    """Freeze what waits in block-wise training, as it is in the turn that needs most activations: the one with the first
    block, since backward ends at the first block that trains.
    """
    if isinstance(mode, Blockwise):
        trains = deepest_turn(model, mode.config)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name not in trains:
                freeze(parameter)


def mode_needs(mode: MemoryMode, model: nn.Module, hardware: Hardware, fused: bool) -> OptimizerNeeds:
    """Memory and time of the optimizer of ``mode`` for the ``model`` that :func:`prepare_without_data` gave;
    with ``fused``, one kernel makes the update wherever the mode's optimizer is torch's AdamW.

    What block-wise training needs is that of the turn with the largest gradients and state, which need not be the turn of
    :func:`begin_turn`. State that waits in RAM is counted where that is the device's memory, and state on disk nowhere. The
    time is that of reading and writing weights, gradients and state: projecting gradients, and the singular vectors that it
    takes now and then, are not in it.

    Raises :class:`~hf_offload.errors.OffloadConfigError` where the optimizer would.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = used = mode.state_bytes(model)
    weights = sum(parameter.nbytes for parameter in trained)
    gradients = 0
    if isinstance(mode, Blockwise):
        most = peak_bytes(model, mode.config)
        weights = gradients = most.gradients
        if hardware.device == "cpu" and mode.config.inactive_state == "ram":
            state = most.all_state + most.masters  # what waits is in the same memory
        if fused:
            copies = 0
        elif hardware.device == "cpu":
            copies = _largest(trained)
        else:
            copies = max(most.masters, weights)  # of all at once (foreach), in float32 where there are masters
        step = most.step_gradients + copies
    elif isinstance(mode, Projected):
        step = _projected_step(mode, model)
    elif trains_every_weight(mode) or (fused and mode.takes_fused):
        step = 0  # one kernel reads and writes each element
    elif isinstance(mode, LoraFaConfig) or hardware.device == "cpu":
        step = _largest(trained)
    else:
        step = weights
    moved = 3 * weights + 2 * used
    return OptimizerNeeds(state, step, moved / hardware.memory_bytes_per_s.value, gradients)


def trains_every_weight(mode: MemoryMode) -> bool:
    """Whether forward and backward are those of the model without a mode."""
    return isinstance(mode, (Projected, AdamW8bitConfig, AdamW4bitConfig))


def updates_in_backward(mode: MemoryMode | None) -> bool:
    """Whether gradients never add up."""
    return isinstance(mode, Projected) and mode.update_in_backward


def _put_on(model: nn.Module, device: str) -> None:
    """Other parameters of the same shapes in place of the model's; those that were one stay one."""
    others: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in others:
                others[old] = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device), old.requires_grad)
            setattr(module, name, others[old])


def _largest(trained: list[nn.Parameter]) -> int:
    return max((parameter.nbytes for parameter in trained), default=0)


def _projected_step(mode: Projected, model: nn.Module) -> int:
    """Of the weight that needs most: they are updated one after the other."""
    narrow = mode.method.plain_state_dtype is not None
    most = 0
    for group in param_groups(model, targets=mode.targets):
        for _, parameter in group["params"]:
            copies = parameter.nbytes  # of the step
            if group["projected"]:
                copies += _SINGLE_BYTES * parameter.numel()  # of the gradient, for singular vectors
            elif narrow and parameter.dim() > 1:
                copies = 5 * _SINGLE_BYTES * parameter.numel()  # gradient, moments, root and step
            most = max(most, copies)
    return most


class FourBitLinear(nn.Module):
    """Stands in for a linear layer of bitsandbytes with a frozen weight in 4 bits: nothing of the input is saved, and forward
    and backward make the whole weight again for as long as they need it.
    """

    def __init__(self, layer: nn.Linear, mode: QloraConfig):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        nbytes = mode.weight_bytes(layer.weight.numel())
        self.weight = nn.Parameter(torch.empty(nbytes, dtype=torch.uint8), requires_grad=False)
        self.bias = layer.bias
        self._dtype = layer.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        """As the layer's; the result is copied, as peft does with layers in 4 bits."""
        shape = (self.out_features, self.in_features)
        result: Tensor = _FourBitProduct.apply(x, shape, self.bias)  # type: ignore[no-untyped-call]
        return result.clone()


class _FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        ctx.shape = shape
        return nn.functional.linear(x, x.new_empty(shape), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient @ gradient.new_empty(ctx.shape), None, None
