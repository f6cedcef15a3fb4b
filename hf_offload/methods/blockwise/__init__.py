"""Block-wise training: a few blocks of a model train at a time (LISA, BAdam)."""

from hf_offload.methods.blockwise.freezing import release
from hf_offload.methods.blockwise.optimizer import BlockwiseOptimizer
from hf_offload.methods.blockwise.schedule import BlockwiseBytes, BlockwiseConfig, deepest_turn, peak_bytes

__all__ = ["BlockwiseBytes", "BlockwiseConfig", "BlockwiseOptimizer", "deepest_turn", "peak_bytes", "release"]
