"""Snapshots of a loop that is the user's own, and its place in the data, which a loader with a ``state_dict`` knows."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from hf_offload.errors import OffloadConfigError, OffloadError, SnapshotError
from hf_offload.generators import process_states, set_process_states
from hf_offload.ranks import Ranks
from hf_offload.settings.environment import RESUME_VARIABLE, is_on
from hf_offload.settings.schema import OffloadConfig
from hf_offload.snapshots import contents
from hf_offload.snapshots.contents import Content
from hf_offload.snapshots.restoring import Found
from hf_offload.snapshots.taking import Snapshots
from hf_offload.storage.service import RunStorage
from hf_offload.surgery import InertInCopies

logger = logging.getLogger(__name__)

_WEIGHTS_FILE = "model.safetensors"
_OPTIMIZERS_FILE = "optimizers.pt"
_OWN_FILE = "loop.pth"


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
    the snapshots for the next start.

    Attributes:
        taking: What takes them, inside of the block.
        resumed_step: The step of the snapshot that this run goes on from, or 0.
        step: Optimizer steps so far, those before the resume included.
    """

    def __init__(
        self, model: nn.Module, objects: Mapping[str, Any], config: OffloadConfig, folder: Path, storage: RunStorage,
        resume: bool | None,
    ):  # fmt: skip
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
        self.taking: Snapshots | None = None
        self.resumed_step = self.step = 0
        self._is_entered = False
        self._model = model
        self._objects = dict(objects)
        self._config = config
        self._folder = folder.resolve()
        self._ranks: Ranks = Ranks()
        self._storage = storage
        self._is_asked = resume is not None
        self._resume = is_on(RESUME_VARIABLE) if resume is None else resume
        self._position = Position()

    @property
    def epoch(self) -> int:
        """How many epochs of :meth:`batches` are over: the one to begin or go on with."""
        return self._position.epoch

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of one epoch of ``loader``, which has a ``state_dict``. After a resume, the epoch goes on behind the
        last batch of the snapshot, in the order it had, and with the generators that there were.
        """
        return self._position.of(loader)

    def end_step(self) -> None:
        """A step of the optimizer is over, and all that belongs to it: schedules, scalers, averages."""
        if self.taking is None:
            raise OffloadError("Snapshots are taken inside of their block: with session.snapshots(...) as snapshots.")
        self.step += 1
        if self.step % int(self._config.snapshot_steps or 0) == 0:
            self.taking.take(self.step, self._contents)

    def __enter__(self) -> Self:
        if self._is_entered:
            raise OffloadError("A block of snapshots is entered once: call session.snapshots(...) for another one.")
        taking = Snapshots(self._folder, self._config, self._ranks)
        try:
            found = taking.open(self._resume, is_asked=self._is_asked)
            if found is not None:
                self._ranks.each(lambda: self._restore(found))
            elif self._resume:
                logger.warning("There is no snapshot of %s yet: training starts at its beginning.", self._folder)
            taking.begin(self._storage)
        except BaseException:
            taking.end(well=False)
            self._ranks.close()
            raise
        taking.forget_found()
        self.taking, self._is_entered = taking, True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        taking, self.taking = self.taking, None
        if taking is not None:
            try:
                taking.end(well=kind is None)
            finally:
                self._ranks.close()

    def _restore(self, found: Found) -> None:
        weights = contents.weights_of(self._model)
        contents.check_weights(weights, found.folder / _WEIGHTS_FILE, str(found))
        own = contents.load(found.folder / contents.of_rank(_OWN_FILE, self._ranks))
        states = contents.load(found.folder / _OPTIMIZERS_FILE) | own["objects"]
        if states.keys() != self._objects.keys():
            there, here = (", ".join(sorted(names)) or "nothing but a model" for names in (states, self._objects))
            raise SnapshotError(
                f"{found} holds {there}, and this training has {here}: resume with what it was taken of, or start from the "
                "beginning."
            )
        contents.load_weights(weights, found.folder / _WEIGHTS_FILE)
        for name, each in self._objects.items():
            each.load_state_dict(states[name])
        self.step = self.resumed_step = found.step
        self._position.restore(own["position"])
        set_process_states(own["generators"])
        logger.info("Resuming from %s.", found)

    def _contents(self) -> tuple[dict[str, Content], dict[str, bytes]]:
        """Optimizers are in a file that is written tensor by tensor. What else each rank has is small."""
        # First: that of an optimizer may complete updates of weights.
        states = {name: each.state_dict() for name, each in self._objects.items()}
        position = self._position.state()
        for name, state in {**states, "loader": position}.items():
            contents.check_loadable(f"{name}.state_dict()", state)
        optimizers = {name: states.pop(name) for name, each in self._objects.items() if isinstance(each, Optimizer)}
        files = {
            _WEIGHTS_FILE: contents.weights_file(contents.weights_of(self._model)),
            _OPTIMIZERS_FILE: contents.archive(optimizers),
        }
        own = contents.archived({"objects": states, "position": position, "generators": process_states()})
        return files, {contents.of_rank(_OWN_FILE, self._ranks): own}


class Position:
    """The batches of one epoch after the other.

    Attributes:
        epoch: How many epochs are over.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._is_within = False
        self._loader: Any = None  # of the present epoch, or the last one
        self._restored: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` takes."""
        loader = None if self._loader is None else self._loader.state_dict()
        return {"epoch": self.epoch, "is_within": self._is_within, "loader": loader}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there: the generators of the process are those of the last batch that was had."""
        self.epoch, self._restored = state["epoch"], None if state["loader"] is None else state

    def of(self, loader: Any) -> Iterator[Any]:
        """The batches of an epoch; of the first one after a restore, those that are left.

        Raises :class:`~hf_offload.errors.OffloadError` for a loader that does not know its place, and where the batches of
        another epoch are still asked for.
        """
        if self._is_within:
            raise OffloadError(
                "snapshots.batches() was called in the middle of an epoch, and a resume could not find its place in two "
                "loaders: use it for the training's one loader, and others, such as those of an evaluation, as they are."
            )
        problem = None
        is_accelerates = hasattr(loader, "use_stateful_dataloader")  # it has the methods in any case
        if is_accelerates or not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            problem = f"a {type(loader).__name__} has no state_dict()" + " of its place in an epoch" * is_accelerates
        elif getattr(loader, "generator", None) is not None:
            problem = "a StatefulDataLoader does not find its place in a generator of its own: leave generator out"
        if problem is not None:
            raise OffloadError(
                f"A resume could not find its place in the data: {problem}. Give snapshots.batches() a StatefulDataLoader of "
                "torchdata, as it is."
            )
        self._loader, self._is_within = loader, True
        restored, self._restored = self._restored, None
        try:
            yield from iter(loader) if restored is None else self._resumed(loader, restored)
        finally:
            self.epoch, self._is_within = self.epoch + 1, False

    def _resumed(self, loader: Any, state: dict[str, Any]) -> Iterator[Any]:
        now = process_states()
        loader.load_state_dict(state["loader"])
        iterator = iter(loader)
        set_process_states(now)
        if not state["is_within"] and isinstance(loader, DataLoader):
            torch.empty((), dtype=torch.int64).random_()  # the seed of workers, which a new epoch draws
        return iterator


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


def expect_snapshots(model: nn.Module, how: str) -> RemovableHandle:
    """Until its loop takes snapshots, which ``how`` says, a forward of ``model`` in training is an error."""

    def refuse(model: nn.Module, args: Any) -> None:
        if model.training and torch.is_grad_enabled():
            raise OffloadConfigError(
                "snapshot_steps is set, and this loop takes no snapshots, for it alone knows where a step ends: write "
                f"{how}, or leave snapshot_steps out."
            )

    return model.register_forward_pre_hook(InertInCopies(refuse))
