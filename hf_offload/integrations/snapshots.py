"""Snapshots of a Trainer: what its checkpoints hold, and a resume that finds them.

A checkpoint of the Trainer drops the loss that was not logged yet. A snapshot has it in the Trainer's state, so that the
losses of a resumed run are those of one that never stopped.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from torch import Tensor, nn
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
from transformers.training_args import ParallelMode

from hf_offload.errors import OffloadConfigError, SnapshotError
from hf_offload.generators import process_states
from hf_offload.integrations.checkpoints import json_of, last_complete_checkpoint, state_of, unchanging_files
from hf_offload.ranks import Ranks
from hf_offload.settings.environment import RESUME_VARIABLE, is_on
from hf_offload.settings.schema import OffloadConfig
from hf_offload.snapshots import contents
from hf_offload.snapshots.contents import Content
from hf_offload.snapshots.loops import common_problem
from hf_offload.snapshots.restoring import LINKS, Found, damage_on_disk
from hf_offload.snapshots.taking import Snapshots
from hf_offload.storage.service import storage_of

logger = logging.getLogger(__name__)

_LOSSES = "hf_offload_losses"
"""Among the states of callbacks, those of a run until its snapshot."""
_ADAPTER = "default"
_FIXED = (BatchSampler, BatchSamplerShard, SequentialSampler, SkipBatchSampler)


class TrainerSnapshots:
    """The snapshots of one call of ``Trainer.train``.

    Attributes:
        taking: What takes them.
    """

    def __init__(self, trainer: Trainer, config: OffloadConfig):
        self._trainer: Any = trainer
        self._steps = int(config.snapshot_steps or 0)
        self._refuse(_problem(trainer, config))
        self._ranks = Ranks()
        self._output = Path(trainer.args.output_dir or ".").resolve()
        self.taking = Snapshots(self._output, config, self._ranks)
        self._has_begun = self._is_cut = False
        self._first_step, self._last_step, self._postponed = 0, -1, -1
        self._unchanging: dict[str, bytes] | None = None

    def _refuse(self, problem: str | None) -> None:
        if problem is not None:
            raise OffloadConfigError(
                f"snapshot_steps={self._steps} cannot be used here: {problem}. Leave it out, and set save_steps."
            )

    # -- before training ----------------------------------------------------------------------------------------------------

    def open(self, asked: str | bool | None) -> str | None:
        """Connect to the snapshot process, or start it. Returns the checkpoint to resume from.

        Raises :class:`~hf_offload.errors.SnapshotError` if another training is connected to it, or for snapshots that do not
        fit this one.
        """
        resume = asked is True or (asked is None and is_on(RESUME_VARIABLE))
        named = None if resume or not asked else str(asked)
        found = self.taking.open(resume, named, is_asked=asked is not None)
        if named is not None and (damage := damage_on_disk(Path(named))) is not None:
            raise SnapshotError(f"The snapshot in {named} is damaged: {damage}. Resume from another one.")
        if not resume:
            return named
        checkpoint = self._ranks.first(
            lambda: last_complete_checkpoint(self._output) if self._output.is_dir() else None
        )
        if found is not None:
            if self._trainer.model is not None:  # else it is made later, by model_init
                name, weights = self._weights()
                self._ranks.each(lambda: contents.check_weights(weights, found.folder / name, str(found)))
            if checkpoint is None or not self._ranks.first(lambda: self._is_newer(Path(checkpoint), found)):
                logger.info("Resuming from %s.", found)
                return str(found.folder)
            self.taking.forget_found()
        elif checkpoint is None:
            if next(self._output.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), None) is not None:
                raise ValueError(f"No valid checkpoint found in output directory ({self._output}): none is complete.")
            logger.warning(
                "There is no snapshot or checkpoint of %s yet: training starts at its beginning.", self._output
            )
        return checkpoint

    def _is_newer(self, checkpoint: Path, found: Found) -> bool:
        """Whether a checkpoint is of the same run, and so much later that a snapshot is missing. Otherwise the snapshot is
        better: a checkpoint lacks the loss that was not logged yet.
        """
        path = checkpoint / TRAINER_STATE_NAME
        step = json.loads(path.read_bytes())["global_step"]
        return bool(path.stat().st_mtime >= found.record["began"] and step > found.step + self._steps)

    # -- while training -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Training begins, or begins anew with another size of batches."""
        trainer = self._trainer
        self._refuse(_order_problem(trainer.callback_handler.train_dataloader))
        if self._has_begun:
            self.taking.begin_run()
        self.taking.begin(storage_of(self._model))
        self._has_begun = True
        self._last_step = self._first_step = trainer.state.global_step
        losses = trainer.state.stateful_callbacks.pop(_LOSSES, None)
        if losses is not None:
            trainer._tr_loss += losses["unlogged"][self._ranks.number]
            trainer._total_loss_scalar, trainer._globalstep_last_logged = losses["total"], losses["last_logged_step"]
            self._first_step = losses["first_step"]

    @property
    def mean_loss(self) -> float:
        """That of all steps of the run, those before a resume included."""
        trainer = self._trainer
        return float(trainer._total_loss_scalar / max(trainer.state.global_step - self._first_step, 0.001))

    def after_step(self) -> None:
        """A step has ended, with what is logged, evaluated and saved after it; or an epoch."""
        state, control = self._trainer.state, self._trainer.control
        self.taking.forget_found()  # all of it was read
        is_due = state.global_step % self._steps == 0 and state.global_step != self._last_step
        if not self._has_begun or self._is_cut or not is_due or control.should_training_stop:
            return
        if control.should_epoch_stop:
            logger.warning("An epoch was cut short, after which a Trainer cannot resume: no more snapshots are taken.")
            self._is_cut = True
        elif float(state.epoch).is_integer() and self._postponed != state.global_step:
            self._postponed = state.global_step  # what belongs to the end of the epoch comes first
        else:
            self._last_step = state.global_step
            losses = {
                "unlogged": self._ranks.gather(self._trainer._tr_loss.item()),
                "total": self._trainer._total_loss_scalar,
                "last_logged_step": self._trainer._globalstep_last_logged,
                "first_step": self._first_step,
            }
            self.taking.take(state.global_step, lambda: self._contents(losses))

    def _contents(self, losses: dict[str, Any]) -> tuple[dict[str, Content], dict[str, bytes]]:
        trainer = self._trainer
        if self._unchanging is None:
            scratch = self._output / f"{LINKS}-{self._ranks.number}"
            self._unchanging = unchanging_files(trainer, self._model, scratch)
        optimizer, schedule = trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()
        contents.check_loadable("optimizer.state_dict()", optimizer)
        contents.check_loadable("lr_scheduler.state_dict()", schedule)
        state = state_of(trainer)
        state.stateful_callbacks[_LOSSES] = losses
        small = {SCHEDULER_NAME: contents.archived(schedule), TRAINER_STATE_NAME: json_of(state), **self._unchanging}
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            small[SCALER_NAME] = contents.archived(scaler.state_dict())
        name, weights = self._weights()
        files = {name: contents.weights_file(weights), OPTIMIZER_NAME: contents.archive(optimizer)}
        files |= {name: contents.small_file(content) for name, content in small.items()}
        return files, {contents.of_rank("rng_state.pth", self._ranks): contents.archived(process_states())}

    def _weights(self) -> tuple[str, dict[str, Tensor]]:
        """The weights and the name of their file, as a checkpoint has them: of a model of PEFT, its adapter alone."""
        model: Any = self._model
        if not hasattr(model, "peft_config"):
            return "model.safetensors", contents.weights_of(model)
        from peft import get_peft_model_state_dict

        state = model.state_dict(keep_vars=True)
        adapter = get_peft_model_state_dict(model, state, _ADAPTER, save_embedding_layers=False)
        return "adapter_model.safetensors", contents.once(adapter)

    @property
    def _model(self) -> nn.Module:
        found: nn.Module = self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)
        return found

    def close(self, well: bool) -> None:
        """Training has ended, ``well`` or not. Idempotent."""
        self.taking.end(well and self._has_begun)
        self._ranks.close()


@contextlib.contextmanager
def snapshots_of(trainer: Trainer, config: OffloadConfig, asked: str | bool | None, name: str) -> Iterator[str | None]:
    """Take snapshots of a training inside the block, as the attribute ``name`` of ``trainer``. What the block gets is the
    checkpoint to resume from, where ``asked`` is what was given for it.
    """
    snapshots = TrainerSnapshots(trainer, config)
    well = False
    try:
        checkpoint = snapshots.open(asked)
        setattr(trainer, name, snapshots)
        yield checkpoint
        well = True
    finally:
        setattr(trainer, name, None)
        snapshots.close(well)


def _problem(trainer: Trainer, config: OffloadConfig) -> str | None:
    """Why a snapshot would not be all that a run needs to go on; None if it is."""
    args: Any = trainer.args
    parallel = ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED, ParallelMode.DISTRIBUTED
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "DeepSpeed and FSDP save shards in a way of their own"
    if args.parallel_mode not in parallel:
        return f"processes that train together as {args.parallel_mode.value} are not DDP's"
    if args.ignore_data_skip:
        return "with ignore_data_skip=True a run that resumes sees other batches than one that did not stop"
    if trainer.train_dataset is not None and not has_length(trainer.train_dataset):
        return "a Trainer does not know where the epochs of a data set without a length end"
    model: Any = trainer.model
    adapters = getattr(model, "peft_config", {})
    is_native = getattr(model, "_hf_peft_config_loaded", False)
    if is_native or (adapters and (set(adapters) != {_ADAPTER} or adapters[_ADAPTER].is_prompt_learning)):
        return (
            "a checkpoint does not hold adapters other than one of get_peft_model() named default, or learned prompts"
        )
    if adapters and any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in model.modules()):
        return "a checkpoint of PEFT does not hold the statistics of batch norm"
    return common_problem(config, args.world_size)


def _order_problem(loader: Any) -> str | None:
    """Why the number of an epoch, which is all that a resume of a Trainer knows, does not decide the order of its batches."""
    if loader.persistent_workers:
        return "persistent workers draw random numbers in a training's first epoch only (persistent_workers=True)"
    sampler = loader
    while True:
        inner = [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]
        sampler = next((each for each in inner if each is not None), None)
        if sampler is None:
            return None
        if type(sampler) not in _FIXED and not hasattr(sampler, "set_epoch"):
            return f"the number of an epoch does not decide the order of the sampler {type(sampler).__qualname__}"
