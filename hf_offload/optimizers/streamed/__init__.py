"""The optimizer that the user has chosen, with its state and gradients in RAM or on an SSD, bit for bit."""

from hf_offload.optimizers.streamed.optimizer import (
    StreamedOptimizer,
    StreamedState,
    check_streamable,
    clip_grad_norm_,
    state_per_weight,
    stream,
    streaming_of,
)
from hf_offload.optimizers.streamed.setting import StreamedSetting
from hf_offload.parameters.demand import gradient_of, has_gradient

__all__ = [
    "StreamedOptimizer",
    "StreamedSetting",
    "StreamedState",
    "check_streamable",
    "clip_grad_norm_",
    "gradient_of",
    "has_gradient",
    "state_per_weight",
    "stream",
    "streaming_of",
]
