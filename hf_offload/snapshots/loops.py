"""Snapshots of a loop that is the user's own."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_offload.errors import OffloadConfigError, OffloadError, SnapshotError
from hf_offload.generators import process_states, set_process_states
from hf_offload.ranks import Ranks
from hf_offload.settings.environment import RESUME_VARIABLE, is_on
from hf_offload.settings.schema import OffloadConfig
from hf_offload.snapshots import contents
from hf_offload.snapshots.likeness import check_config, check_optimizers, config_of, optimizer_of
from hf_offload.snapshots.loadable import check_loadable, numpy_allowed
from hf_offload.snapshots.memory import Write
from hf_offload.snapshots.opening import Opened, check_memory_files, open_snapshots, warn_of_other_sums
from hf_offload.snapshots.positions import Position
from hf_offload.snapshots.taking import Snapshots
from hf_offload.snapshots.weights import ModelWeights, left_on_drives
from hf_offload.storage.kept import Kept
from hf_offload.storage.service import HeldRam, RunStorage
from hf_offload.surgery import InertInCopies

logger = logging.getLogger(__name__)

ALONE = "with snapshot_parity, processes make good what one of them loses, and there is one"

_RANDOM_FILE = "rng_state.pth"
_POSITION_FILE = "position.pth"


class Source(Protocol):
    """What the snapshots of a loop hold, besides generators and the position in the data.

    Attributes:
        models: The weights, by the names of their files.
        optimizers: Before whose steps a snapshot has to be whole.
    """

    @property
    def models(self) -> Mapping[str, ModelWeights]: ...

    @property
    def optimizers(self) -> Sequence[Any]: ...

    def files(self, ranks: Ranks, kept: Kept | None) -> tuple[dict[str, Write], list[Tensor]]:
        """The other files, and the tensors that are written after this has returned; with ``kept``, optimizers leave there
        what is on drives. All ranks call it.

        Raises :class:`~hf_offload.errors.SnapshotError` for what a resume could not load, in all ranks.
        """

    def load(self, folder: Path, ranks: Ranks) -> None:
        """Take over the other files."""


class LoopSnapshots:
    """Snapshots of one run of a loop, as :meth:`hf_offload.session.OffloadSession.snapshots` returns them::

        with session.snapshots("run", optimizer=optimizer, scheduler=scheduler, resume=True) as snapshots:
            for epoch in range(snapshots.epoch, epochs):
                for batch in snapshots.batches(loader):
                    model(**batch).loss.backward()
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    snapshots.end_step()

    On entering the block, everything is as it was at the newest whole snapshot, if there is one. Leaving it by an error keeps
    the snapshots for the next start. At its end, the newest one stays until the process has ended well.

    Attributes:
        taking: What takes them, inside of the block.
        resumed_step: The step of the snapshot that this run goes on from, or 0.
        step: Optimizer steps so far, those before the resume included.
    """

    def __init__(self, source: Source, config: OffloadConfig, folder: Path, storage: RunStorage, resume: bool | None):
        check_memory_files()
        self.taking: Snapshots | None = None
        self._opened: Opened | None = None
        self._is_entered = False
        self._likeness: dict[str, Any] = {}
        self.resumed_step = self.step = 0
        self._source = source
        self._steps = int(config.snapshot_steps or 0)
        self._directory = None if config.snapshot_dir is None else Path(config.snapshot_dir).resolve()
        self._wait_s = float(config.snapshot_wait_s)
        self._at_once = config.optimizer not in (None, "none") or config.memory_mode != "none" or not source.optimizers
        self._with_parity = config.snapshot_parity > 0
        self._folder = folder.resolve()
        self._ranks: Ranks = Ranks()
        self._storage = storage
        self._unasked = resume is None
        self._resume = is_on(RESUME_VARIABLE) if resume is None else resume
        self._position = Position()
        self._hooks: list[Any] = []

    @property
    def epoch(self) -> int:
        """How many epochs of :meth:`batches` are over: the one to begin or go on with."""
        return self._position.epoch

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of one epoch of ``loader``. After a resume, the epoch goes on behind the last batch of the snapshot:
        in the order it had, shuffled or not, and with the generators that there were.
        """
        return self._position.of(loader)

    def end_step(self) -> None:
        """A step of the optimizer is over, and all that belongs to it: schedules, scalers, averages."""
        if self.taking is None:
            raise OffloadError("Snapshots are taken inside of their block: with session.snapshots(...) as snapshots.")
        self.step += 1
        self.taking.look()
        if self.step % self._steps == 0:
            with self.taking.waited():
                self._take(self.taking)
        self._expect_writes()

    def __enter__(self) -> Self:
        if self._is_entered:
            raise OffloadError("A block of snapshots is entered once: call session.snapshots(...) for another one.")
        opened = open_snapshots(self._folder, self._directory, self._resume, self._ranks, unasked=self._unasked)
        try:
            others = {**self._source.files(self._ranks, None)[0], **self._small_files()}
            self._likeness = {
                "configs": {name: config_of(weights.model) for name, weights in self._source.models.items()},
                "optimizers": [optimizer_of(each) for each in self._source.optimizers],
            }
            if opened.found is not None:
                self._ranks.each(lambda: self._restore(opened, [*self._source.models, *others]))
                warn_of_other_sums([weights.model for weights in self._source.models.values()], self._ranks)
            elif self._resume:
                logger.warning("There is no snapshot of %s yet: training starts at its beginning.", self._folder)
            taking = Snapshots(
                opened.address,
                opened.client,
                HeldRam(self._storage, "snapshots"),
                self._ranks,
                sequence=opened.sequence,
                with_parity=self._with_parity,
            )
            taking.start(opened.run, opened.began, self._directory, self._wait_s, opened.found)
        except BaseException:
            opened.client.close()
            self._ranks.close()
            raise
        finally:
            opened.forget_found()
        self.taking, self._opened, self._is_entered = taking, opened, True
        self._storage.settle_copies = taking.settle
        self._expect_writes()
        for optimizer in self._source.optimizers:
            while hasattr(optimizer, "optimizer"):  # in accelerate's wrapper
                optimizer = optimizer.optimizer
            self._hooks.append(optimizer.register_step_pre_hook(InertInCopies(lambda *_: taking.settle())))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._storage.takes_digests = False
        self._storage.settle_copies = None
        taking, self.taking = self.taking, None
        opened, self._opened = self._opened, None
        if taking is None or opened is None:
            return
        if kind is not None:
            taking.leave()
            self._ranks.close()
            return
        try:
            taking.settle()
            self._ranks.gather(None)  # what one has that ends too early is of no use to the others
        finally:
            # A loop that has left its data in the middle would go on behind that step.
            before = self.step if self._position.is_cut else None
            taking.over(opened.training.number, opened.end_well, opened.others(self._ranks), before)
            self._ranks.close()
        logger.info("%d snapshots were taken, for which training waited %.2f s in all.", taking.taken, taking.stalled_s)

    def _restore(self, opened: Opened, expected: Sequence[str]) -> None:
        found = opened.found
        assert found is not None
        what = f"The snapshot of step {found.step} in {found.place}"
        for name, weights in self._source.models.items():
            weights.check(found.folder, found.record["models"].get(name), what, name)
        names = sorted(found.names)
        if names != sorted(expected):
            raise SnapshotError(
                f"{what} holds {', '.join(names)}, and this training has {', '.join(sorted(expected))}: resume with what it "
                "was taken of, or start from the beginning."
            )
        likeness = found.record["likeness"]
        for name, config in self._likeness["configs"].items():
            check_config(likeness["configs"][name], config, what)
        check_optimizers(likeness["optimizers"], self._likeness["optimizers"], what)
        self._likeness = likeness
        for name, weights in self._source.models.items():
            weights.load(found.folder / name)
        self._source.load(found.folder, self._ranks)
        self.step = self.resumed_step = found.step
        self._position.restore(_read(found.folder / contents.of_rank(_POSITION_FILE, self._ranks)))
        set_process_states(_read(found.folder / contents.of_rank(_RANDOM_FILE, self._ranks)))
        logger.info("Resuming from the snapshot of step %d in %s.", found.step, found.place)

    def _expect_writes(self) -> None:
        """What the next step writes to a drive is kept if a snapshot follows."""
        self._storage.takes_digests = (self.step + 1) % self._steps == 0

    def _take(self, taking: Snapshots) -> None:
        from hf_offload import __version__

        assert self._opened is not None
        taking.settle()  # before the ranks talk of something else
        files: dict[str, Write] = {}
        watched: list[Tensor] = []
        models: dict[str, str] = {}
        kept = taking.kept()
        try:  # first: it may complete updates of the weights
            others, written_later = self._source.files(self._ranks, kept)
        except SnapshotError as error:
            if taking.taken == 0:
                raise
            logger.warning("A snapshot was not taken: %s The one before stays.", error)
            return
        for name, weights in self._source.models.items():
            tensors = weights.tensors(copy_buffers=True)
            layout = contents.layout_of(tensors)
            models[name] = contents.fingerprint(layout)
            tensors = left_on_drives(tensors, kept)
            files[name] = contents.weights_file(tensors, layout, kept)
            watched += tensors.values()
        files |= others | self._small_files()
        watched += written_later
        taking.take(
            self.step,
            files,
            watched,
            {
                "version": __version__,
                "training": self._opened.training.number,
                "place": self._opened.place,
                "models": models,
                "likeness": self._likeness,
            },
            kept=kept,
            at_once=self._at_once
            or self._storage.has_state
            or any(weights.are_parked for weights in self._source.models.values()),
        )

    def _small_files(self) -> dict[str, Write]:
        own = {
            contents.of_rank(_RANDOM_FILE, self._ranks): contents.archived(process_states()),
            contents.of_rank(_POSITION_FILE, self._ranks): contents.archived(self._position.state()),
        }
        return contents.of_all_ranks(own, self._ranks)


class Objects:
    """A model, and what else has a ``state_dict``: :class:`Source` of a loop without a framework."""

    def __init__(self, model: nn.Module, objects: Mapping[str, Any]):
        weights = ModelWeights(model)
        self.models = {weights.file: weights}
        self._objects = dict(objects)
        for name, each in self._objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise OffloadConfigError(
                    f"snapshots({name}=...) takes what has state_dict() and load_state_dict(), and a {type(each).__name__} "
                    "has not."
                )
        self.optimizers = [each for each in self._objects.values() if isinstance(each, Optimizer)]

    def files(self, ranks: Ranks, kept: Kept | None) -> tuple[dict[str, Write], list[Tensor]]:
        states = {
            name: contents.optimizer_state(each, kept) if isinstance(each, Optimizer) else each.state_dict()
            for name, each in self._objects.items()
        }
        ranks.each(lambda: _check(states))
        files: dict[str, Write] = {}
        own: dict[str, bytes] = {}
        later: list[Tensor] = []
        for name, state in states.items():
            if isinstance(self._objects[name], Optimizer):
                files[f"{name}.pt"] = contents.archive(state, kept)
                later += contents.tensors_in(state)
            else:
                own[contents.of_rank(f"{name}.pt", ranks)] = contents.archived(state)
        return files | contents.of_all_ranks(own, ranks), later

    def load(self, folder: Path, ranks: Ranks) -> None:
        for name, each in self._objects.items():
            file = f"{name}.pt" if isinstance(each, Optimizer) else contents.of_rank(f"{name}.pt", ranks)
            each.load_state_dict(_read(folder / file))


def _check(states: Mapping[str, Any]) -> None:
    with numpy_allowed():
        for name, state in states.items():
            check_loadable(f"{name}.state_dict()", state)


def _read(file: Path) -> Any:
    """Tensors, numbers, texts and the states of NumPy's generators; a file with anything else is an error."""
    with numpy_allowed():
        return torch.load(file, map_location="cpu", weights_only=True)


def refuse_loop(config: OffloadConfig, processes: int, models: Sequence[nn.Module]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` where a snapshot would not be all that a loop needs to go on."""
    problem = None
    if config.snapshot_parity and processes == 1:
        problem = ALONE
    elif any(isinstance(each, DTensor) for model in models for each in model.parameters()):
        problem = "the shards of FSDP2 are saved in a way of their own"
    elif config.sampling is not None and config.sampling.probabilities == "gradient-cache":
        problem = (
            'sampled_linear keeps a cache of gradients (probabilities="gradient-cache"), which snapshots do not hold'
        )
    if problem is not None:
        raise OffloadConfigError(
            f"snapshot_steps={config.snapshot_steps} cannot be used here: {problem}. Leave it out, and save checkpoints."
        )


class Expected:
    """A model whose config has ``snapshot_steps``, until its loop takes any: a forward in training is an error before."""

    def __init__(self, model: nn.Module, how: str):
        self._how = how
        self._hook = model.register_forward_pre_hook(InertInCopies(self._refuse))

    def remove(self) -> None:
        """Snapshots are taken, or the model is given back. Idempotent."""
        self._hook.remove()

    def _refuse(self, model: nn.Module, args: Any) -> None:
        if model.training and torch.is_grad_enabled():
            raise OffloadConfigError(
                "snapshot_steps is set, and this loop takes no snapshots, for it alone knows where a step ends: write "
                f"{self._how}, or leave snapshot_steps out."
            )
