"""Optimizers with a small state: GaLore, APOLLO, FRUGAL."""

from hf_offload.methods.projected.config import ApolloConfig, FrugalConfig, GaLoreConfig, ProjectedConfig
from hf_offload.methods.projected.optimizer import ProjectedAdamW, UpdateInBackward
from hf_offload.methods.projected.sizes import state_bytes

__all__ = [
    "ApolloConfig",
    "FrugalConfig",
    "GaLoreConfig",
    "ProjectedAdamW",
    "ProjectedConfig",
    "UpdateInBackward",
    "state_bytes",
]
