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
from torch.utils.data import DataLoader

from hf_offload.errors import OffloadConfigError, OffloadError, SnapshotError
from hf_offload.generators import process_states, set_process_states
from hf_offload.ranks import Ranks
from hf_offload.settings.environment import RESUME_VARIABLE, is_on
from hf_offload.settings.schema import OffloadConfig
from hf_offload.snapshots import contents
from hf_offload.snapshots.identity import check_traits, traits_of
from hf_offload.snapshots.memory import Write
from hf_offload.snapshots.positions import Position
from hf_offload.snapshots.restoring import Opened, open_snapshots
from hf_offload.snapshots.taking import Snapshots, directory_of
from hf_offload.snapshots.weights import ModelWeights
from hf_offload.storage.service import RunStorage
from hf_offload.surgery import InertInCopies

logger = logging.getLogger(__name__)

_RANDOM_FILE = "rng_state.pth"
_POSITION_FILE = "position.pth"
_OBJECTS_FILE = "objects.pth"


class Source(Protocol):
    """What the snapshots of a loop hold, besides generators and the position in the data.

    Attributes:
        models: The weights, by the names of their files.
        optimizers: Before whose steps a snapshot has to be whole.
        names: What else there is, in words.
    """

    @property
    def models(self) -> Mapping[str, ModelWeights]: ...

    @property
    def optimizers(self) -> Sequence[Any]: ...

    @property
    def names(self) -> list[str]: ...

    def files(self, ranks: Ranks) -> tuple[dict[str, Write], list[Tensor]]:
        """The other files, and the tensors that are written after this has returned. All ranks call it.

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
        self.taking: Snapshots | None = None
        self.resumed_step = self.step = 0
        self._is_entered = False
        self._source = source
        self._config = config
        self._steps = int(config.snapshot_steps or 0)
        self._at_once = config.optimizer not in (None, "none") or config.memory_mode != "none" or not source.optimizers
        self._folder = folder.resolve()
        self._ranks: Ranks = Ranks()
        self._storage = storage
        self._is_asked = resume is not None
        self._resume = is_on(RESUME_VARIABLE) if resume is None else resume
        self._position = Position()
        self._traits = traits_of((weights.model for weights in source.models.values()), source.optimizers)

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

    def __enter__(self) -> Self:
        if self._is_entered:
            raise OffloadError("A block of snapshots is entered once: call session.snapshots(...) for another one.")
        opened = open_snapshots(
            self._folder, directory_of(self._config), self._resume, self._ranks, is_asked=self._is_asked
        )
        try:
            if opened.found is not None:
                self._ranks.each(lambda: self._restore(opened))
            elif self._resume:
                logger.warning("There is no snapshot of %s yet: training starts at its beginning.", self._folder)
            taking = Snapshots(opened, self._config, self._storage, self._ranks)
            taking.start()
        except BaseException:
            self._storage.settle_copies = None
            opened.client.close()
            self._ranks.close()
            raise
        finally:
            opened.forget_found()
        self.taking, self._is_entered = taking, True
        for optimizer in self._source.optimizers:
            taking.settle_before_steps_of(optimizer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        taking, self.taking = self.taking, None
        if taking is None:
            return
        try:
            if kind is None:
                # One that has left its data in the middle would go on after its last step.
                taking.over(before=self.step if self._position.is_cut else None)
            else:
                taking.leave()
        finally:
            self._ranks.close()

    def _restore(self, opened: Opened) -> None:
        found = opened.found
        assert found is not None
        folder, record = found.folder, found.record
        for name, weights in self._source.models.items():
            weights.check(folder, record["models"].get(name), str(found), name)
        if record["names"] != self._source.names:
            raise SnapshotError(
                f"{found} holds {_listed(record['names'])}, and this training has {_listed(self._source.names)}: resume with "
                "what it was taken of, or start from the beginning."
            )
        check_traits(record["traits"], self._traits, str(found))
        for name, weights in self._source.models.items():
            weights.load(folder / name)
        self._source.load(folder, self._ranks)
        self.step = self.resumed_step = found.step
        self._position.restore(contents.load(folder / contents.of_rank(_POSITION_FILE, self._ranks)))
        set_process_states(contents.load(folder / contents.of_rank(_RANDOM_FILE, self._ranks)))
        logger.info("Resuming from %s.", found)

    def _take(self, taking: Snapshots) -> None:
        taking.settle()  # before the ranks talk of something else
        files: dict[str, Write] = {}
        watched: list[Tensor] = []
        models: dict[str, str] = {}
        try:  # first: it may complete updates of the weights
            others, written_later = self._source.files(self._ranks)
            position = self._position.state()
            self._ranks.each(lambda: contents.check_loadable("loader.state_dict()", position))
        except SnapshotError as error:
            taking.refuse(error)
            return
        for name, weights in self._source.models.items():
            tensors = weights.tensors(copy_buffers=True)
            layout = contents.layout_of(tensors)
            models[name] = contents.fingerprint(layout)
            files[name] = contents.weights_file(tensors, layout)
            watched += tensors.values()
        own = {
            contents.of_rank(_RANDOM_FILE, self._ranks): contents.archived(process_states()),
            contents.of_rank(_POSITION_FILE, self._ranks): contents.archived(position),
        }
        taking.take(
            self.step,
            files | others | contents.of_all_ranks(own, self._ranks),
            watched + written_later,
            {"models": models, "names": self._source.names, "traits": self._traits},
            at_once=self._at_once
            or self._storage.has_state
            or any(weights.are_parked for weights in self._source.models.values()),
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing but a model"


class Objects:
    """A model, and what else has a ``state_dict``: :class:`Source` of a loop without a framework."""

    def __init__(self, model: nn.Module, objects: Mapping[str, Any]):
        weights = ModelWeights(model)
        self.models = {weights.file: weights}
        self.names = sorted(objects)
        for name, each in objects.items():
            if isinstance(each, DataLoader):
                raise OffloadConfigError(
                    f"snapshots({name}=...) takes no loader: iterate over snapshots.batches({name})."
                )
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise OffloadConfigError(
                    f"snapshots({name}=...) takes what has state_dict() and load_state_dict(), and a {type(each).__name__} "
                    "has not."
                )
        self._optimizers = {name: each for name, each in objects.items() if isinstance(each, Optimizer)}
        self._others = {name: each for name, each in objects.items() if name not in self._optimizers}
        self.optimizers = list(self._optimizers.values())
        self._are_checked = False

    def files(self, ranks: Ranks) -> tuple[dict[str, Write], list[Tensor]]:
        """Optimizers in files of their own, to be written later, and the others in one."""
        states = {name: each.state_dict() for name, each in self._optimizers.items()}
        others = {name: each.state_dict() for name, each in self._others.items()}

        def check() -> None:
            for name, state in (states | others).items():
                is_known = self._are_checked and name in states  # its tensors are of one kind
                contents.check_loadable(f"{name}.state_dict()", state.get("param_groups") if is_known else state)

        ranks.each(check)
        self._are_checked = True
        files = {f"{name}.pt": contents.archive(state) for name, state in states.items()}
        own = {contents.of_rank(_OBJECTS_FILE, ranks): contents.archived(others)}
        return files | contents.of_all_ranks(own, ranks), list(contents.tensors_in(list(states.values())))

    def load(self, folder: Path, ranks: Ranks) -> None:
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(contents.load(folder / f"{name}.pt"))
        states = contents.load(folder / contents.of_rank(_OBJECTS_FILE, ranks))
        for name, each in self._others.items():
            each.load_state_dict(states[name])


def refuse_loop(config: OffloadConfig, processes: int, models: Sequence[nn.Module]) -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` where a snapshot would not be all that a loop needs to go on."""
    problem = common_problem(config, processes)
    if any(isinstance(each, DTensor) for model in models for each in model.parameters()):
        problem = "the shards of FSDP2 are saved in a way of their own"
    if problem is not None:
        raise OffloadConfigError(
            f"snapshot_steps={config.snapshot_steps} cannot be used here: {problem}. Leave it out, and save checkpoints."
        )


def common_problem(config: OffloadConfig, processes: int) -> str | None:
    """Why no training with these settings can take snapshots; None if one can."""
    if config.snapshot_parity and processes == 1:
        return "with snapshot_parity, processes make good what one of them loses, and there is one"
    if config.sampling is not None and config.sampling.probabilities == "gradient-cache":
        return 'sampled_linear keeps a cache of gradients (probabilities="gradient-cache"), which snapshots do not hold'
    return None


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
