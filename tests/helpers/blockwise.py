"""The published settings of block-wise training."""

from typing import Any

from hf_offload.methods.blockwise import BlockwiseConfig


def lisa(blocks_active: int = 2, switch_every: int = 20, **settings: Any) -> BlockwiseConfig:
    """A new random set of blocks each turn; what lies outside of them always trains."""
    return BlockwiseConfig(blocks_active=blocks_active, switch_every=switch_every, order="draw", **settings)


def badam(**settings: Any) -> BlockwiseConfig:
    """One block at a time, what lies outside of them among them."""
    return BlockwiseConfig(**{"outside": "turns"} | settings)
