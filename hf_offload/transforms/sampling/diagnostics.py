"""Errors of estimated gradients, layer by layer, on the run's own data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.errors import OffloadConfigError
from hf_offload.generators import process_states, set_process_states
from hf_offload.settings.sampling import SampledLinearConfig
from hf_offload.transforms.sampling.apply import sampled_linears
from hf_offload.transforms.sampling.linear import draw_part

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5)
# The gradient of one batch is off by about this much from that of all data anyway; more noise than that is felt.
_TOLERATED = 1.0
_DRAWS = 8


@dataclasses.dataclass(frozen=True)
class LayerError:
    """Of one layer: ``errors`` maps ratios to the root mean square error of the weight gradient, over its norm.

    ``suggested_ratio`` is the smallest whose error is at most ``tolerated``, or None if none of them is.
    """

    name: str
    errors: dict[float, float]
    suggested_ratio: float | None


def measure_errors(
    model: nn.Module,
    inputs: Mapping[str, Any],
    config: SampledLinearConfig | None = None,
    *,
    ratios: Sequence[float] = RATIOS,
    draws: int = _DRAWS,
    tolerated: float = _TOLERATED,
) -> list[LayerError]:
    """Run one forward and backward of ``model`` on ``inputs`` and compare, for every layer that ``config`` would convert, the
    exact gradient of its weight with ``draws`` estimates of it at each of ``ratios``.

    The model must return a loss. Its gradients are as they were before, and so are the random numbers that a training draws.

    Raises :class:`~hf_offload.errors.OffloadConfigError` if there is nothing to measure.
    """
    config = config or SampledLinearConfig()
    layers, _ = sampled_linears(model, config)
    found: dict[str, dict[float, float]] = {}
    given: dict[str, Tensor] = {}
    handles = []

    def remember(name: str) -> Any:
        return lambda module, arguments: given.__setitem__(name, arguments[0].detach())

    def compare(name: str) -> Any:
        return lambda module, _, gradients: found.__setitem__(
            name, _errors(given.pop(name), gradients[0].detach(), config, ratios, draws)
        )

    before = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in before:
        parameter.grad = None  # a backward would add to the one that is there
    drawn = process_states()
    try:
        with torch.enable_grad():
            for name, layer in layers.items():
                handles.append(layer.register_forward_pre_hook(remember(name)))
                handles.append(layer.register_full_backward_hook(compare(name)))
            loss = getattr(model(**inputs), "loss", None)
            if loss is None:
                raise OffloadConfigError("The model returned no loss: give labels among the inputs.")
            loss.backward()
    finally:
        set_process_states(drawn)
        for handle in handles:
            handle.remove()
        for parameter, gradient in before.items():
            parameter.grad = gradient
    return [
        LayerError(name, found[name], next((one for one in sorted(ratios) if found[name][one] <= tolerated), None))
        for name in layers
        if name in found
    ]


def _errors(
    inputs: Tensor, gradient: Tensor, config: SampledLinearConfig, ratios: Sequence[float], draws: int
) -> dict[float, float]:
    rows = gradient.reshape(-1, gradient.shape[-1])
    exact = rows.t().float() @ inputs.reshape(-1, inputs.shape[-1]).float()
    size = exact.norm().clamp_min(torch.finfo(torch.float).tiny)
    errors = {}
    for ratio in ratios:
        tried = dataclasses.replace(config, ratio=ratio)
        squares = []
        for _ in range(draws):
            with torch.enable_grad():  # a backward hook runs without
                part = draw_part(inputs, gradient.dtype, tried)
            if part is not None:
                squares.append((part.product(rows, part.kept, False).float() - exact).square().sum())
        errors[ratio] = float(torch.stack(squares).mean().sqrt() / size) if squares else 0.0
    return errors
