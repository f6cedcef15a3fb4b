"""Snapshots of a Trainer: what its checkpoints hold, and a resume that finds them.

A checkpoint of the Trainer drops the loss that was not logged yet. A snapshot has it in its record, so that the losses of a
resumed run are those of one that never stopped.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
from transformers.training_args import ParallelMode

from hf_offload.errors import OffloadConfigError, SnapshotError, TierFullError
from hf_offload.generators import process_states
from hf_offload.integrations.checkpoint_files import json_of, state_of, unchanging_files
from hf_offload.integrations.checkpoints import last_complete_checkpoint
from hf_offload.ranks import Ranks
from hf_offload.settings.environment import RESUME_VARIABLE, is_on
from hf_offload.settings.memory_modes import NONE
from hf_offload.settings.schema import OffloadConfig
from hf_offload.snapshots import contents
from hf_offload.snapshots.identity import check_traits, traits_of
from hf_offload.snapshots.loops import common_problem
from hf_offload.snapshots.memory import Write
from hf_offload.snapshots.positions import order_problem
from hf_offload.snapshots.restoring import LINKS, Found, Opened, named_snapshot, open_snapshots
from hf_offload.snapshots.taking import Snapshots, directory_of
from hf_offload.snapshots.weights import ModelWeights
from hf_offload.storage.service import storage_of

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
        _refuse(config.snapshot_steps, _problem(trainer, config))
        self.taking: Snapshots | None = None
        self.is_over = self._is_cut = False
        self.checkpoint: str | None = None
        self._ranks = Ranks()
        self._trainer: Any = trainer
        self._config = config
        self._steps = int(config.snapshot_steps or 0)
        self._at_once = config.optimizer not in (None, "none") or getattr(trainer.args, "memory_mode", NONE) != NONE
        self._output = Path(trainer.args.output_dir or ".").resolve()
        self._opened: Opened | None = None
        self._of_model: ModelWeights | None = None
        self._first_step, self._last_step, self._postponed = 0, -1, -1
        self._unchanging: dict[str, Write] | None = None

    # -- before training ----------------------------------------------------------------------------------------------------

    def open(self, asked: str | bool | None) -> str | None:
        """Connect to the snapshot process, or start it. Returns the checkpoint to resume from.

        Raises :class:`~hf_offload.errors.SnapshotError` if another training is connected to it, or for snapshots that do not
        fit this one.
        """
        resume = asked is True or (asked is None and is_on(RESUME_VARIABLE))
        named = None if resume or not asked else str(asked)
        opened = self._opened = open_snapshots(
            self._output, directory_of(self._config), resume, self._ranks, named, is_asked=asked is not None
        )
        if named is not None:
            opened.found = self._ranks.each(lambda: named_snapshot(Path(named), self._ranks.count))
        found = opened.found
        if found is not None and self._trainer.model is not None:  # else it is made later, by model_init
            self._ranks.each(
                lambda: self._weights.check(found.folder, found.record["model"], str(found), self._weights.file)
            )
        if not resume:
            return named
        checkpoint = self._ranks.first(
            lambda: last_complete_checkpoint(self._output) if self._output.is_dir() else None
        )
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
        logger.info("Resuming from %s.", found)
        return str(found.folder)

    def check_traits(self) -> None:
        """The optimizer's state is about to be loaded.

        Raises :class:`~hf_offload.errors.SnapshotError` if the snapshot is of another class of optimizer, or of a model with
        another config.
        """
        found = None if self._opened is None else self._opened.found
        if found is not None:
            check_traits(found.record["trainer"]["traits"], self._traits, str(found))

    @property
    def _traits(self) -> dict[str, str]:
        return traits_of([self._model], [self._trainer.optimizer])

    # -- while training -----------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Any) -> None:
        """Training begins, or begins anew with another size of batches."""
        opened, trainer = self._opened, self._trainer
        assert opened is not None
        loader = trainer.callback_handler.train_dataloader
        problem = order_problem(loader, by_epoch_alone=True)
        _refuse(
            self._steps,
            None if problem is None else f"{problem}, and the number of an epoch is all that a resume knows",
        )
        found = opened.found
        if self.taking is not None:
            self.taking.settle()
            opened.begin_run(self._ranks)
        else:
            self.taking = Snapshots(opened, self._config, storage_of(self._model), self._ranks)
        self.taking.start()
        step = self._last_step = self._first_step = trainer.state.global_step
        if found is not None and found.step == step:
            self._restore_losses(found.record["trainer"])
        self.is_over = self.checkpoint is not None and step >= trainer.state.max_steps
        if self.is_over:
            logger.warning(
                "This training ended at step %d of %d: nothing is trained, and what follows it is done again. More max_steps "
                "or num_train_epochs let it go on.",
                step,
                trainer.state.max_steps,
            )
        self.taking.settle_before_steps_of(optimizer)

    @property
    def mean_loss(self) -> float:
        """That of all steps of the run, those before a resume included, as a Trainer has it once they are over."""
        trainer = self._trainer
        return float(trainer._total_loss_scalar / max(trainer.state.global_step - self._first_step, 0.001))

    def _losses(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "unlogged_losses": self._ranks.gather(trainer._tr_loss.item()),
            "total_loss": trainer._total_loss_scalar,
            "first_step": self._first_step,
            "last_logged_step": trainer._globalstep_last_logged,
            "total_flos": trainer.state.total_flos,
            "current_flos": trainer.current_flos,
        }

    def _restore_losses(self, kept: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer._tr_loss += kept["unlogged_losses"][self._ranks.number]
        trainer._total_loss_scalar, self._first_step = kept["total_loss"], kept["first_step"]
        trainer._globalstep_last_logged = kept["last_logged_step"]
        trainer.state.total_flos, trainer.current_flos = kept["total_flos"], kept["current_flos"]

    def after_step(self) -> None:
        """A step has ended, with what is logged, evaluated and saved after it; or an epoch."""
        state, control = self._trainer.state, self._trainer.control
        if self._opened is not None:
            self._opened.forget_found()  # all of it was read
        if self.taking is None or self._is_cut:
            return
        self.taking.look()
        if state.global_step % self._steps or state.global_step == self._last_step or control.should_training_stop:
            return
        if control.should_epoch_stop:
            logger.warning("An epoch was cut short, after which a Trainer cannot resume: no more snapshots are taken.")
            self._is_cut = True
            return
        if float(state.epoch).is_integer() and self._postponed != state.global_step:
            self._postponed = state.global_step  # what belongs to the end of the epoch comes first
            return
        self._last_step = state.global_step
        with self.taking.waited():
            self._take(self.taking)

    def after_last_step(self) -> None:
        """All that was to be trained is, and what belongs to it is over: a snapshot of the end is taken. Where a callback has
        stopped training before, a restart goes on from the one before, and the callback decides again.
        """
        state = self._trainer.state
        if self.is_over:
            self._trainer._load_rng_state(self.checkpoint)
        elif self.taking is not None and not self._is_cut and state.global_step >= state.max_steps:
            try:
                with self.taking.waited():
                    self._take(self.taking)
                    self.taking.settle()
            except (OSError, SnapshotError, TierFullError) as error:  # training is not lost for that
                logger.warning("The last snapshot was not taken: %s", error)

    def _take(self, taking: Snapshots) -> None:
        taking.settle()  # before the ranks talk of something else
        trainer = self._trainer
        if self._unchanging is None:
            scratch = self._output / f"{LINKS}-{self._ranks.number}"
            self._unchanging = unchanging_files(trainer, self._model, scratch)
        optimizer, schedule = trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()
        try:
            checked = optimizer.get("param_groups") if taking.taken else optimizer  # the state is of one kind
            self._ranks.each(lambda: contents.check_loadable("optimizer.state_dict()", checked))
            self._ranks.each(lambda: contents.check_loadable("lr_scheduler.state_dict()", schedule))
        except SnapshotError as error:
            taking.refuse(error)
            return
        weights = self._weights.tensors(copy_buffers=True)
        layout = contents.layout_of(weights)
        own = {contents.of_rank(RNG_NAME, self._ranks): contents.archived(process_states())}
        scaler = getattr(trainer.accelerator, "scaler", None)
        small = {
            SCHEDULER_NAME: contents.archived(schedule),
            TRAINER_STATE_NAME: json_of(state_of(trainer)),
            **({} if scaler is None else {SCALER_NAME: contents.archived(scaler.state_dict())}),
        }
        files = {
            self._weights.file: contents.weights_file(weights, layout),
            OPTIMIZER_NAME: contents.archive(optimizer),
            **contents.of_all_ranks(own, self._ranks),
            **{name: contents.small_file(content) for name, content in small.items()},
            **self._unchanging,
        }
        taking.take(
            trainer.state.global_step,
            files,
            [*weights.values(), *contents.tensors_in(optimizer)],
            {"model": contents.fingerprint(layout), "trainer": {"traits": self._traits, **self._losses()}},
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
        taking, self.taking = self.taking, None
        if opened is not None:
            opened.forget_found()
            if taking is None:
                opened.client.close()
            elif well:
                taking.over()
            else:
                taking.leave()
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


def _is_newer(checkpoint: Path, found: Found, steps: int) -> bool:
    """Whether a checkpoint is of the same run, and so much later that a snapshot of every so many ``steps`` is missing.

    Otherwise the snapshot is better: a checkpoint lacks the loss that was not logged yet.
    """
    path = checkpoint / TRAINER_STATE_NAME
    return bool(
        path.stat().st_mtime >= found.record["began"]
        and json.loads(path.read_bytes())["global_step"] > found.step + steps
    )


def _refuse(steps: int | None, problem: str | None) -> None:
    if problem is not None:
        raise OffloadConfigError(
            f"snapshot_steps={steps} cannot be used here: {problem}. Leave it out, and set save_steps."
        )


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
    return common_problem(config, args.world_size)
