"""Activation offloading for Hugging Face training: GPU memory to RAM to SSD, with bit-exact gradients."""

import importlib
from typing import TYPE_CHECKING, Any

from hf_offload.errors import (
    OffloadConfigError,
    OffloadError,
    SavedTensorModifiedError,
    StorageError,
    TierFullError,
)

if TYPE_CHECKING:
    from hf_offload.integrations.accelerate import OffloadPlugin
    from hf_offload.integrations.arguments import (
        OffloadArguments,
        OffloadSeq2SeqTrainingArguments,
        OffloadTrainingArguments,
    )
    from hf_offload.integrations.trainer import OffloadCallback
    from hf_offload.pretrained.load import create_from_config, load_pretrained
    from hf_offload.session import OffloadSession, attach, offload_activations
    from hf_offload.settings.elementwise import RecomputeElementwiseConfig
    from hf_offload.settings.memory_modes import memory_mode
    from hf_offload.settings.sampling import SampledLinearConfig
    from hf_offload.settings.schema import OffloadConfig
    from hf_offload.transforms.sampling.diagnostics import measure_errors

__version__ = "0.1.0"

# Loaded on first use: `import hf_offload` stays light, and plain PyTorch use never imports the Trainer.
_HOMES = {
    "RecomputeElementwiseConfig": "hf_offload.settings.elementwise",
    "OffloadArguments": "hf_offload.integrations.arguments",
    "OffloadCallback": "hf_offload.integrations.trainer",
    "OffloadConfig": "hf_offload.settings.schema",
    "OffloadPlugin": "hf_offload.integrations.accelerate",
    "OffloadSeq2SeqTrainingArguments": "hf_offload.integrations.arguments",
    "OffloadSession": "hf_offload.session",
    "OffloadTrainingArguments": "hf_offload.integrations.arguments",
    "SampledLinearConfig": "hf_offload.settings.sampling",
    "attach": "hf_offload.session",
    "create_from_config": "hf_offload.pretrained.load",
    "load_pretrained": "hf_offload.pretrained.load",
    "measure_errors": "hf_offload.transforms.sampling.diagnostics",
    "memory_mode": "hf_offload.settings.memory_modes",
    "offload_activations": "hf_offload.session",
}

__all__ = [
    "OffloadArguments",
    "OffloadCallback",
    "OffloadConfig",
    "OffloadConfigError",
    "OffloadError",
    "OffloadPlugin",
    "OffloadSeq2SeqTrainingArguments",
    "OffloadSession",
    "OffloadTrainingArguments",
    "RecomputeElementwiseConfig",
    "SampledLinearConfig",
    "SavedTensorModifiedError",
    "StorageError",
    "TierFullError",
    "attach",
    "create_from_config",
    "load_pretrained",
    "measure_errors",
    "memory_mode",
    "offload_activations",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
