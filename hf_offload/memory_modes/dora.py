"""The memory mode dora."""

import dataclasses
from typing import Any, ClassVar

from hf_offload.memory_modes.lora import Lora


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dora(Lora):
    """DoRA (Liu et al., ICML 2024, arXiv 2402.09353): LoRA for the direction of weights, and a length for each output."""

    name: ClassVar[str] = "dora"

    def _options(self) -> dict[str, Any]:
        return {"use_dora": True}
