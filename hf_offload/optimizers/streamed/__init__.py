"""The optimizer that the user has chosen, with its state and gradients in RAM or on an SSD, bit for bit."""

from hf_offload.optimizers.streamed.optimizer import StreamedOptimizer, StreamedState, stream, streaming_of

__all__ = ["StreamedOptimizer", "StreamedState", "stream", "streaming_of"]
