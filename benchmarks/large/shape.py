"""What is trained, and how."""

import dataclasses
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_offload import OffloadConfig

LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Shape:
    """GPT-2 XL by default, in fp32, without dropout, trained with AdamW and without clipping."""

    layers: int = 48
    width: int = 1600
    vocabulary: int = 50257
    tokens: int = 1024
    steps: int = 5
    budget_bytes: int = 6 << 30
    automatic: bool = False

    @property
    def weights(self) -> int:
        """Numbers that are trained."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.tokens + 2) * self.width

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; AdamW's state takes twice as many, gradients as many."""
        return 4 * self.weights

    def model_config(self) -> Any:
        """The configuration of transformers."""
        from transformers import GPT2Config

        return GPT2Config(
            n_layer=self.layers,
            n_embd=self.width,
            n_head=max(1, self.width // 64),
            vocab_size=self.vocabulary,
            n_positions=self.tokens,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )

    def settings(self, directory: str, most_written_bytes: int, process_bytes: int = 0) -> OffloadConfig:
        """Weights, optimizer state and activations on the drive; or a budget alone, which the process's own
        ``process_bytes`` count towards.
        """
        # Nothing is clipped: gradients need not leave memory.
        placed: dict[str, Any] = {"memory_budget": self.budget_bytes - process_bytes, "update_in_backward": True}
        if not self.automatic:
            placed = {
                "tier": "ssd", "params": "ssd", "optimizer": "ssd", "memory_budget": self.budget_bytes, "tiled_loss": "on",
                "recompute_elementwise": "exact", "update_in_backward": True,
            }  # fmt: skip
        return OffloadConfig(
            **placed, directory=directory, max_disk_write_bytes=most_written_bytes, on_disk_write_limit="stop"
        )


def text_tokens(tokens: int) -> Iterator[torch.Tensor]:
    """The source text of the standard library, a byte a token, in rows of shape [1, tokens], for ever."""
    rest = b""
    while True:
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            rest += path.read_bytes()
            while len(rest) >= tokens:
                yield torch.frombuffer(bytearray(rest[:tokens]), dtype=torch.uint8).long()[None]
                rest = rest[tokens:]
