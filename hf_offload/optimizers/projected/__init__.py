"""Optimizers with a small state: GaLore, APOLLO, FRUGAL."""

from hf_offload.optimizers.projected.backward import UpdateInBackward
from hf_offload.optimizers.projected.config import ApolloConfig, FrugalConfig, GaLoreConfig, ProjectedConfig
from hf_offload.optimizers.projected.optimizer import ProjectedAdamW
from hf_offload.optimizers.projected.sizes import state_bytes

__all__ = [
    "ApolloConfig",
    "FrugalConfig",
    "GaLoreConfig",
    "ProjectedAdamW",
    "ProjectedConfig",
    "UpdateInBackward",
    "state_bytes",
]
