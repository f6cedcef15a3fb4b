"""Snapshots of a Trainer: what its checkpoints hold, and a resume that finds them.

A checkpoint of the Trainer drops the loss that was not logged yet. A snapshot has it in its record, so that the losses of a
resumed run are those of one that never stopped.
"""

import contextlib
import json
import logging
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

import hf_offload
from hf_offload.errors import SnapshotError, TierFullError
from hf_offload.generators import process_states
from hf_offload.integrations.checkpoint_files import json_of, state_of, unchanging_files
from hf_offload.integrations.checkpoints import last_complete_checkpoint
from hf_offload.integrations.snapshot_refusals import refuse, refuse_order
from hf_offload.ranks import Ranks
from hf_offload.settings.environment import RESUME_VARIABLE, is_on
from hf_offload.settings.memory_modes import NONE
from hf_offload.settings.schema import OffloadConfig
from hf_offload.snapshots import contents
from hf_offload.snapshots.likeness import (
    check_config,
    check_optimizers,
    config_of,
    optimizer_of,
    warn_of_another_schedule,
    warn_of_other_data,
)
from hf_offload.snapshots.loadable import check_loadable
from hf_offload.snapshots.memory import Small, Write
from hf_offload.snapshots.opening import Opened, links_of, open_snapshots, warn_of_other_sums
from hf_offload.snapshots.restoring import Found, snapshot_on_disk
from hf_offload.snapshots.taking import Snapshots
from hf_offload.snapshots.weights import ModelWeights, left_on_drives
from hf_offload.storage.service import HeldRam, storage_of
from hf_offload.surgery import InertInCopies

logger = logging.getLogger(__name__)

RNG_NAME = "rng_state.pth"


class TrainerSnapshots:
    """The snapshots of one call of ``Trainer.train``.

    Attributes:
        checkpoint: What training goes on from.
        taking: Those that this training takes, once it has begun.
        is_over: Whether what it goes on from is its end, so that there is nothing to train.
    """

    def __init__(self, trainer: Trainer, config: OffloadConfig):
        refuse(trainer, config)
        self.taking: Snapshots | None = None
        self.is_over = self._is_cut = self._is_stopped_by_result = False
        self.checkpoint: str | None = None
        self._ranks = Ranks()
        self._with_parity = config.snapshot_parity > 0
        self._trainer = trainer
        self._steps = int(config.snapshot_steps or 0)
        self._directory = None if config.snapshot_dir is None else Path(config.snapshot_dir).resolve()
        self._wait_s = float(config.snapshot_wait_s)
        self._at_once = config.optimizer not in (None, "none") or getattr(trainer.args, "memory_mode", NONE) != NONE
        self._output = Path(trainer.args.output_dir or ".").resolve()
        self._opened: Opened | None = None
        self._of_model: ModelWeights | None = None
        self._first_step, self._begun_step, self._last_step, self._postponed = 0, 0, -1, -1
        self._settling: Any = None
        self._config: dict[str, str] = {}
        self._optimizer: dict[str, Any] = {}
        self._unchanging: dict[str, Write] | None = None

    # -- before training ----------------------------------------------------------------------------------------------------

    def open(self, asked: str | bool | None) -> str | None:
        """Connect to the snapshot process, or start it. Returns the checkpoint to resume from.

        Raises :class:`~hf_offload.errors.SnapshotError` if another training is connected to it, or for snapshots that do not
        fit this one.
        """
        unasked = asked is None and is_on(RESUME_VARIABLE)
        resume = asked is True or unasked
        named = None if resume or not asked else str(asked)
        opened = self._opened = open_snapshots(
            self._output, self._directory, resume, self._ranks, named, unasked=unasked
        )
        if named is not None:
            opened.found = self._ranks.each(lambda: snapshot_on_disk(Path(named), self._ranks.count))
            self._check_weights(opened.found)
        if not resume:
            return named
        checkpoint = self._ranks.first(
            lambda: last_complete_checkpoint(self._output) if self._output.is_dir() else None
        )
        found = opened.found
        if found is None:
            if checkpoint is None and next(self._output.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), None) is not None:
                raise ValueError(f"No valid checkpoint found in output directory ({self._output}): none is complete.")
            if checkpoint is None:
                logger.warning(
                    "There is no snapshot or checkpoint of %s yet: training starts at its beginning.", self._output
                )
            return checkpoint
        if checkpoint is not None and self._ranks.first(lambda: _is_newer(Path(checkpoint), found, self._steps)):
            opened.forget_found()
            return checkpoint
        self._check_weights(found)
        logger.info("Resuming from the snapshot of step %d in %s.", found.step, found.place)
        return str(found.folder)

    def _check_weights(self, found: Found | None) -> None:
        if found is not None and self._trainer.model is not None:  # else it is made later, by model_init
            self._ranks.each(lambda: self._weights.check(found.folder, found.record["model"], _what(found)))

    def check_optimizer(self) -> None:
        """The optimizer's state is about to be loaded.

        Raises :class:`~hf_offload.errors.SnapshotError` if that in the snapshot is of another class of optimizer.
        """
        found = None if self._opened is None else self._opened.found
        if found is not None:
            here = optimizer_of(self._trainer.optimizer)
            check_optimizers([found.record["trainer"]["optimizer"]], [here], _what(found))

    # -- while training -----------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Any) -> None:
        """Training begins, or begins anew with another size of batches."""
        opened = self._opened
        assert opened is not None
        trainer: Any = self._trainer
        refuse_order(trainer.callback_handler.train_dataloader, self._steps)
        found = opened.found
        if self.taking is not None:
            self.taking.settle()
            opened.run, opened.began = self._ranks.first(lambda: (uuid.uuid4().hex, time.time()))
        else:
            self.taking = Snapshots(
                opened.address,
                opened.client,
                HeldRam(storage_of(self._model), "snapshots"),
                self._ranks,
                sequence=opened.sequence,
                with_parity=self._with_parity,
            )
        storage_of(self._model).settle_copies = self.taking.settle
        self._expect_writes(trainer.state.global_step)
        self.taking.start(opened.run, opened.began, self._directory, self._wait_s, found)
        self._last_step = trainer.state.global_step
        self._first_step = self._begun_step = trainer.state.global_step
        self._config, self._optimizer = config_of(self._model), optimizer_of(optimizer)
        if found is not None:
            check_config(found.record["trainer"]["config"], self._config, _what(found))
            warn_of_other_data(found.record["trainer"]["data"], self._data, _what(found))
            warn_of_another_schedule(found.record["trainer"]["schedule"], self._schedule, _what(found))
            self._optimizer = found.record["trainer"]["optimizer"]
        if found is not None and found.step == trainer.state.global_step:
            self._restore_losses(found.record["trainer"])
            warn_of_other_sums([self._model], self._ranks)
        self.is_over = self._has_ended()
        self._settle_before_steps_of(optimizer)

    def _has_ended(self) -> bool:
        """Whether what training goes on from is its end: of all steps, or one that a result has decided."""
        state, found = self._trainer.state, None if self._opened is None else self._opened.found
        if self.checkpoint is None:
            return False
        end = None if found is None or found.step != state.global_step else found.record["trainer"].get("end")
        if state.global_step >= state.max_steps:
            reason = f"of {state.max_steps}"
        elif end is not None and end["by_result"] and end["max_steps"] == state.max_steps:
            reason = f"of at most {state.max_steps}, as a callback has decided by what was logged or evaluated"
        else:
            return False
        logger.warning(
            "This training ended at step %d %s: nothing is trained, and what follows it is done again. More max_steps or "
            "num_train_epochs let it go on.",
            state.global_step,
            reason,
        )
        return True

    @property
    def _data(self) -> dict[str, Any]:
        """What decides which rows a batch has."""
        trainer: Any = self._trainer
        args = trainer.args
        rows = trainer.train_dataset
        return {
            "number of rows": len(rows) if has_length(rows) else None,
            "per_device_train_batch_size": trainer._train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "data_seed" if args.data_seed is not None else "seed": args.seed
            if args.data_seed is None
            else args.data_seed,
            "dataloader_drop_last": args.dataloader_drop_last,
        }

    @property
    def _schedule(self) -> dict[str, Any]:
        trainer: Any = self._trainer
        args = trainer.args
        return {
            "max_steps": trainer.state.max_steps,
            "lr_scheduler_type": getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type),
            "lr_scheduler_kwargs": args.lr_scheduler_kwargs or None,
            "warmup_steps": args.get_warmup_steps(trainer.state.max_steps),
        }

    @property
    def mean_loss(self) -> float:
        """That of all steps of the run, those before a resume included, as a Trainer has it once they are over."""
        trainer: Any = self._trainer
        return float(trainer._total_loss_scalar / max(trainer.state.global_step - self._first_step, 0.001))

    def _restore_losses(self, kept: dict[str, Any]) -> None:
        trainer: Any = self._trainer
        unlogged = kept["unlogged_losses"][self._ranks.number]
        trainer._tr_loss += unlogged
        trainer._total_loss_scalar, self._first_step = kept["total_loss"], kept["first_step"]
        trainer._globalstep_last_logged = kept["last_logged_step"]
        trainer.state.total_flos, trainer.current_flos = kept["total_flos"], kept["current_flos"]

    def _settle_before_steps_of(self, optimizer: Any) -> None:
        while hasattr(optimizer, "optimizer"):  # in accelerate's wrapper
            optimizer = optimizer.optimizer
        if self._settling is not None:
            self._settling.remove()
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is None or self.taking is None:
            self._at_once = True
            return
        taking = self.taking
        self._settling = register(InertInCopies(lambda *_: taking.settle()))

    def after_step(self, is_stopped_by_result: bool) -> None:
        """A step has ended, with what is logged, evaluated and saved after it; or an epoch. ``is_stopped_by_result`` if a
        callback has ended training by what was logged or evaluated then.
        """
        trainer: Any = self._trainer
        self._is_stopped_by_result |= is_stopped_by_result
        if self._opened is not None:
            self._opened.forget_found()  # all of it was read
        if self.taking is None or self._is_cut:
            return
        self.taking.look()
        state = trainer.state
        if state.global_step % self._steps:
            self._expect_writes(state.global_step)
        if (
            state.global_step % self._steps
            or state.global_step == self._last_step
            or trainer.control.should_training_stop
        ):
            return
        if trainer.control.should_epoch_stop:
            logger.warning("An epoch was cut short, after which a Trainer cannot resume: no more snapshots are taken.")
            self._is_cut = True
            return
        if float(state.epoch).is_integer() and self._postponed != state.global_step:
            self._postponed = state.global_step  # what belongs to the end of the epoch comes first
            return
        self._last_step = state.global_step
        with self.taking.waited():
            self._take()
        self._expect_writes(state.global_step)

    def after_last_step(self) -> None:
        """All that was to be trained is, and what belongs to it is over: the snapshot of this step is one of the end."""
        trainer: Any = self._trainer
        if self.is_over:
            trainer._load_rng_state(self.checkpoint)
        elif self.taking is not None and not self._is_cut and trainer.state.global_step != self._begun_step:
            try:
                with self.taking.waited():
                    self._take(is_end=True)
                    self.taking.settle()
            except (OSError, SnapshotError, TierFullError) as error:  # training is not lost for that
                logger.warning("The last snapshot was not taken: %s", error)

    def _expect_writes(self, step: int) -> None:
        """What the step after ``step`` writes to a drive is kept if a snapshot follows."""
        storage_of(self._model).takes_digests = (step + 1) % self._steps == 0

    def _take(self, is_end: bool = False) -> None:
        assert self.taking is not None
        assert self._opened is not None
        self.taking.settle()  # before the ranks talk of something else
        trainer: Any = self._trainer
        if self._unchanging is None:
            self._unchanging = unchanging_files(trainer, self._model, self._output / links_of(self._ranks))
        weights = self._weights.tensors(copy_buffers=True)
        layout = contents.layout_of(weights)
        kept = self.taking.kept()
        optimizer = contents.optimizer_state(trainer.optimizer, kept)
        schedule = trainer.lr_scheduler.state_dict()
        try:
            self._ranks.each(lambda: _check(optimizer, schedule))
        except SnapshotError as error:
            if self.taking.taken == 0:
                raise
            logger.warning("A snapshot was not taken: %s The one before stays.", error)
            return
        weights = left_on_drives(weights, kept)  # once updates that wait are completed
        files: dict[str, Write] = {
            self._weights.file: contents.weights_file(weights, layout, kept),
            OPTIMIZER_NAME: contents.archive(optimizer, kept),
            SCHEDULER_NAME: contents.archive_now(schedule),
        }
        own = {contents.of_rank(RNG_NAME, self._ranks): contents.archived(process_states())}
        files |= contents.of_all_ranks(own, self._ranks)
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            files[SCALER_NAME] = contents.archive_now(scaler.state_dict())
        state = state_of(trainer)
        files |= self._unchanging
        files[TRAINER_STATE_NAME] = Small(lambda: json_of(state))
        watched = [*weights.values(), *contents.tensors_in(optimizer)]
        self.taking.take(
            state.global_step,
            files,
            watched,
            {
                "version": hf_offload.__version__,
                "training": self._opened.training.number,
                "place": self._opened.place,
                "model": contents.fingerprint(layout),
                "trainer": {
                    "config": self._config,
                    "data": self._data,
                    "schedule": self._schedule,
                    "optimizer": self._optimizer,
                    "unlogged_losses": self._ranks.gather(trainer._tr_loss.item()),
                    "total_loss": trainer._total_loss_scalar,
                    "first_step": self._first_step,
                    "last_logged_step": trainer._globalstep_last_logged,
                    "total_flos": trainer.state.total_flos,
                    "current_flos": trainer.current_flos,
                    "end": {"by_result": self._is_stopped_by_result, "max_steps": state.max_steps} if is_end else None,
                },
            },
            kept=kept,
            at_once=self._at_once or storage_of(self._model).has_state or self._weights.are_parked,
        )

    @property
    def _weights(self) -> ModelWeights:
        """Those of the model, which model_init may have made anew."""
        model = self._model
        if self._of_model is None or self._of_model.model is not model:
            self._of_model = ModelWeights(model)
        return self._of_model

    @property
    def _model(self) -> nn.Module:
        found: nn.Module = self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)
        return found

    # -- after training -----------------------------------------------------------------------------------------------------

    def close(self, well: bool) -> None:
        """Training has ended, ``well`` or not. Idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.forget_found()
        if self._settling is not None:
            self._settling.remove()
            self._settling = None
        taking, self.taking = self.taking, None
        if taking is not None and opened is not None:
            storage_of(self._model).takes_digests = False
            storage_of(self._model).settle_copies = None
            if well:
                taking.settle()
                self._ranks.gather(None)  # what one has that ends too early is of no use to the others
                logger.info(
                    "%d snapshots were taken, for which training waited %.2f s in all.", taking.taken, taking.stalled_s
                )
                taking.over(opened.training.number, opened.end_well, opened.others(self._ranks))
            else:
                taking.leave()
        elif opened is not None:
            opened.client.close()
        self._ranks.close()


@contextlib.contextmanager
def snapshots_of(trainer: Trainer, config: OffloadConfig, asked: str | bool | None, name: str) -> Iterator[str | None]:
    """Take snapshots of a training inside the block, as the attribute ``name`` of ``trainer``. What the block gets is the
    checkpoint to resume from, where ``asked`` is what was given for it.
    """
    snapshots = TrainerSnapshots(trainer, config)
    well = False
    try:
        checkpoint = snapshots.checkpoint = snapshots.open(asked)
        setattr(trainer, name, snapshots)
        yield checkpoint
        well = True
    finally:
        setattr(trainer, name, None)
        snapshots.close(well)


def _what(found: Found) -> str:
    return f"The snapshot of step {found.step} in {found.place}"


def _check(optimizer: Any, schedule: Any) -> None:
    check_loadable("optimizer.state_dict()", optimizer)
    check_loadable("lr_scheduler.state_dict()", schedule)


def _is_newer(checkpoint: Path, found: Found, steps: int) -> bool:
    """Whether a checkpoint is of the same run, and so much later that a snapshot of every so many ``steps`` is missing.

    Otherwise the snapshot is better: a checkpoint lacks the loss that was not logged yet.
    """
    path = checkpoint / TRAINER_STATE_NAME
    return bool(
        path.stat().st_mtime >= found.record["began"]
        and json.loads(path.read_bytes())["global_step"] > found.step + steps
    )
