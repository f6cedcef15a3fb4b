"""Snapshots of a loop that is written with accelerate: what ``save_state`` saves, as files that ``load_state`` loads."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, load_custom_state, save_accelerator_state
from accelerate.utils import DistributedType, load
from torch import Tensor, nn

from hf_offload.errors import OffloadConfigError
from hf_offload.ranks import Ranks
from hf_offload.settings.schema import OffloadConfig
from hf_offload.snapshots import contents
from hf_offload.snapshots.loops import refuse_loop
from hf_offload.snapshots.memory import Write
from hf_offload.snapshots.weights import ModelWeights

_OPTIMIZER = "optimizer"
_SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class Prepared:
    """All that an accelerator has prepared, and what was registered with it: a
    :class:`~hf_offload.snapshots.loops.Source`.
    """

    def __init__(self, accelerator: Accelerator, config: OffloadConfig):
        _refuse(accelerator, config)
        self._accelerator = accelerator
        self._models = [
            ModelWeights(accelerator.unwrap_model(model, keep_torch_compile=False)) for model in accelerator._models
        ]

    @property
    def model(self) -> nn.Module:
        """The first one."""
        return self._models[0].model

    @property
    def models(self) -> Mapping[str, ModelWeights]:
        """As ``load_state`` names their files."""
        return {_numbered(each.file, number): each for number, each in enumerate(self._models)}

    @property
    def optimizers(self) -> Sequence[Any]:
        """In accelerate's wrappers."""
        return list(self._accelerator._optimizers)

    @property
    def names(self) -> list[str]:
        """How many of each kind."""
        accelerator = self._accelerator
        kinds = {
            "optimizers": accelerator._optimizers,
            "schedulers": accelerator._schedulers,
            "registered objects": accelerator._custom_objects,
        }
        return [f"{len(each)} {name}" for name, each in kinds.items()]

    def files(self, ranks: Ranks) -> tuple[dict[str, Write], list[Tensor]]:
        """Optimizers, to be written later, and what is small, as accelerate writes it: much of it in the first rank alone."""
        accelerator = self._accelerator
        files: dict[str, Write] = {}
        later: list[Tensor] = []
        for number, optimizer in enumerate(accelerator._optimizers):
            state = optimizer.state_dict()
            files[_numbered(f"{_OPTIMIZER}.bin", number)] = contents.archive(state)
            later += contents.tensors_in(state)
        with tempfile.TemporaryDirectory(prefix="hf_offload-snapshot-") as folder:
            save_accelerator_state(
                folder,
                [],
                [],
                accelerator._schedulers,
                accelerator._dataloaders,
                accelerator.process_index,
                accelerator.step,
                accelerator.scaler,
            )
            own = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
        for number, each in enumerate(accelerator._custom_objects):
            own[_custom(number, ranks)] = contents.archived(each.state_dict())
        return files | contents.of_all_ranks(own, ranks), later

    def load(self, folder: Path, ranks: Ranks) -> None:
        """As ``load_state`` does it."""
        accelerator = self._accelerator
        found = load_accelerator_state(
            folder,
            [],
            accelerator._optimizers,
            accelerator._schedulers,
            accelerator._dataloaders,
            accelerator.process_index,
            accelerator.scaler,
            "cpu",
            {"weights_only": False},
        )
        accelerator.step = found.get("step", accelerator.step)
        for number, each in enumerate(accelerator._custom_objects):
            if ranks.is_first:
                load_custom_state(each, folder, number)
            else:
                each.load_state_dict(load(folder / _custom(number, ranks), map_location="cpu", weights_only=False))


def _custom(number: int, ranks: Ranks) -> str:
    """Accelerate has that of the first rank alone."""
    return f"custom_checkpoint_{number}.pkl" if ranks.is_first else f"custom_checkpoint_{number}_{ranks.number}.pkl"


def _numbered(name: str, number: int) -> str:
    stem, ending = name.rsplit(".", 1)
    return name if number == 0 else f"{stem}_{number}.{ending}"


def _refuse(accelerator: Accelerator, config: OffloadConfig) -> None:
    refuse_loop(config, accelerator.num_processes, accelerator._models)
    problem = None
    if accelerator.distributed_type in _SHARDED:
        problem = f"{accelerator.distributed_type.value} saves shards in a way of its own"
    elif accelerator._save_model_state_pre_hook:
        problem = "what hooks of register_save_state_pre_hook() save is not known"
    elif not accelerator._models:
        problem = "the accelerator has prepared no model yet: call prepare() first"
    if problem is not None:
        raise OffloadConfigError(f"snapshot_steps={config.snapshot_steps} cannot be used here: {problem}.")
