"""Trainings of a Trainer that snapshots would not bring back as they were."""

import os
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import has_length
from transformers.training_args import ParallelMode

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.schema import OffloadConfig
from hf_offload.snapshots.loops import ALONE
from hf_offload.snapshots.samplers import unlike_each_epoch

_OTHER_BATCHES = "so a run that resumes would see other batches than one that did not stop"


def refuse(trainer: Trainer, config: OffloadConfig) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` where a snapshot would not be all that a run needs to go on."""
    args = trainer.args
    problem = None
    if not hasattr(os, "memfd_create"):
        problem = "snapshots need Linux"
    elif trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        problem = "DeepSpeed and FSDP save shards in a way of their own"
    elif args.parallel_mode not in (ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED, ParallelMode.DISTRIBUTED):
        problem = f"processes that train together as {args.parallel_mode.value} are not DDP's"
    elif config.snapshot_parity and args.world_size == 1:
        problem = ALONE
    elif args.ignore_data_skip:
        problem = "with ignore_data_skip=True a run that resumes sees other batches than one that did not stop"
    elif (what := _unfindable_order(trainer)) is not None:
        problem = f"{what}, {_OTHER_BATCHES}"
    elif config.sampling is not None and config.sampling.probabilities == "gradient-cache":
        problem = (
            'sampled_linear keeps a cache of gradients (probabilities="gradient-cache"), which snapshots do not hold'
        )
    if problem is not None:
        raise _refusal(config.snapshot_steps, problem)


def refuse_order(loader: Any, steps: int) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` for a loader whose order a resume would not find again."""
    problem = unlike_each_epoch(loader)
    if problem is not None:
        raise _refusal(steps, f"{problem}, {_OTHER_BATCHES}")


def _refusal(steps: int | None, problem: str) -> OffloadConfigError:
    return OffloadConfigError(
        f"snapshot_steps={steps} cannot be used here: {problem}. Leave it out, and set save_steps."
    )


def _unfindable_order(trainer: Trainer) -> str | None:
    """Why a resume cannot find the place in the data again; None if it can."""
    args: Any = trainer.args
    data = trainer.train_dataset
    if data is not None and not has_length(data):
        return "a Trainer does not know where the epochs of a data set without a length end"
    if args.dataloader_persistent_workers and args.dataloader_num_workers:
        return "persistent workers draw random numbers in a training's first epoch only (dataloader_persistent_workers=True)"
    if getattr(args, "train_sampling_strategy", None) == "group_by_length" or getattr(args, "group_by_length", False):
        return "batches grouped by length are drawn from the generators of the process"
    if not getattr(args.accelerator_config, "use_seedable_sampler", True):
        return "batches are drawn from the generators of the process (use_seedable_sampler=False)"
    return None
