"""Switching activation checkpointing on for some of a model's blocks, and putting everything back."""

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class Recompute:
    """Which blocks are computed again in backward.

    A :class:`~transformers.modeling_layers.GradientCheckpointingLayer` asks two attributes of its own in every forward; they
    are set block by block. Saved-tensor hooks that are entered around the block see its inputs and nothing else of it.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]):
        self._blocks = weakref.WeakValueDictionary(blocks)  # the model's to keep
        self._before: dict[str, dict[str, Any]] = {}

    def apply(self, names: Iterable[str]) -> None:
        """Compute these blocks again, and no others but those whose user asked for it. Names of other units say nothing."""
        wanted = set(self._blocks) & set(names)
        for name in list(self._before):
            if name not in wanted:
                self._restore(name)
        for name in wanted - set(self._before):
            block: Any = self._blocks[name]
            self._before[name] = {
                attribute: block.__dict__[attribute] for attribute in self._ATTRIBUTES if attribute in block.__dict__
            }
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)

    def remove(self) -> None:
        """Every block as it was."""
        self.apply(())

    _ATTRIBUTES = ("gradient_checkpointing", "_gradient_checkpointing_func")

    def _restore(self, name: str) -> None:
        block, before = self._blocks.get(name), self._before.pop(name)
        if block is None:
            return
        for attribute in self._ATTRIBUTES:
            if attribute in before:
                block.__dict__[attribute] = before[attribute]
            else:
                block.__dict__.pop(attribute, None)
