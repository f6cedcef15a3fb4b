"""Snapshots of a loop that is written with accelerate: of what its accelerator has prepared, and what was registered."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.schema import OffloadConfig
from hf_offload.snapshots.loops import refuse_loop

_SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


def prepared_objects(accelerator: Accelerator, config: OffloadConfig) -> tuple[nn.Module, dict[str, Any]]:
    """The models of an accelerator as one, and what else has a state, by names.

    Raises :class:`~hf_offload.errors.OffloadConfigError` where that would not be all that a loop needs to go on.
    """
    refuse_loop(config, accelerator.num_processes, accelerator._models)
    problem = None
    if accelerator.distributed_type in _SHARDED:
        problem = f"{accelerator.distributed_type.value} saves shards in a way of its own"
    elif not accelerator._models:
        problem = "the accelerator has prepared no model yet: call prepare() first"
    if problem is not None:
        raise OffloadConfigError(f"snapshot_steps={config.snapshot_steps} cannot be used here: {problem}.")
    models = [accelerator.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models]
    kinds = {
        "optimizer": [each.optimizer for each in accelerator._optimizers],
        "scheduler": accelerator._schedulers,
        "object": accelerator._custom_objects,
        "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
    }
    objects = {f"{kind} {number}": each for kind, found in kinds.items() for number, each in enumerate(found)}
    return models[0] if len(models) == 1 else nn.ModuleList(models), objects
