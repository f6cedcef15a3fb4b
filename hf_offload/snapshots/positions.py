"""Where a loop is in its data, and which loaders a resume finds their place in.

Note: the place in the data
    A loader with a ``state_dict``, such as torchdata's ``StatefulDataLoader``, knows it. For a ``DataLoader`` of torch or
    accelerate, batches are counted. Its order is found again where its samplers are the known ones of torch and accelerate,
    which draw it when an epoch begins, or have ``set_epoch``: that method promises that the number of the epoch decides.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hf_offload.errors import OffloadError
from hf_offload.generators import process_states, set_process_states

_SAMPLER = "torch.utils.data.sampler."
_FIXED = {
    "builtins.list",
    "builtins.range",
    f"{_SAMPLER}SequentialSampler",
    f"{_SAMPLER}BatchSampler",
    "accelerate.data_loader.BatchSamplerShard",
    "accelerate.data_loader.SkipBatchSampler",
}
_DRAWN = {f"{_SAMPLER}{name}" for name in ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")}
"""They draw the order of an epoch when it begins: from their ``generator``, or from the process's."""
_COUNTERS = ("epoch", "iteration", "initial_seed")
"""What decides the order of an epoch in loaders of accelerate, and in samplers with ``set_epoch``."""
_INSTEAD = (
    "Give snapshots.batches() a StatefulDataLoader of torchdata, or a DataLoader with a sampler of torch or accelerate"
)


def order_problem(loader: Any, *, by_epoch_alone: bool = False) -> str | None:
    """Why a resume could not find the order of the batches again, in words; None if it can. ``by_epoch_alone`` where nothing
    but the number of the epoch is restored, as in a Trainer.
    """
    if getattr(loader, "use_stateful_dataloader", False):
        return "use_stateful_dataloader=True of accelerate begins an epoch too early: set use_seedable_sampler=True instead"
    if _has_state(loader) and getattr(loader, "generator", None) is not None:
        return "a StatefulDataLoader does not find its place in a generator of its own: leave generator out"
    if isinstance(loader, (list, tuple)) or (_has_state(loader) and not by_epoch_alone):
        return None
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} has no state_dict()"
    if loader.persistent_workers:
        return "persistent workers draw random numbers in a training's first epoch only (persistent_workers=True)"
    if isinstance(loader.dataset, IterableDataset):
        return f"the {type(loader.dataset).__name__} has no order that is known"
    known = _FIXED if by_epoch_alone else _FIXED | _DRAWN
    for part in _samplers(loader):
        name = f"{type(part).__module__}.{type(part).__qualname__}"
        if name not in known and not hasattr(part, "set_epoch"):
            return f"the sampler {type(part).__qualname__} does not say what decides its order"
    return None


def _has_state(loader: Any) -> bool:
    is_accelerates = hasattr(loader, "use_stateful_dataloader")  # it has the methods in any case
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not is_accelerates


def _samplers(loader: Any) -> list[Any]:
    """The sampler of batches, if there is one, and what it takes its rows from."""
    found: list[Any] = []
    part = loader
    while True:
        inner = [getattr(part, name, None) for name in ("batch_sampler", "sampler")]
        part = next((each for each in inner if each is not None), None)
        if part is None or any(part is each for each in found):
            return found
        found.append(part)


def _parts(loader: Any) -> list[Any]:
    return [loader, *_samplers(loader)] if isinstance(loader, DataLoader) else []


def _order_of(loader: Any) -> list[dict[str, Any]]:
    """What decides the order of the epoch that begins."""
    found = []
    for part in _parts(loader):
        own: dict[str, Any] = getattr(part, "__dict__", {})  # a list has none
        state = {name: own[name] for name in _COUNTERS if type(own.get(name)) is int}
        if isinstance(own.get("generator"), torch.Generator):
            state["generator"] = own["generator"].get_state()
        found.append(state)
    return found


def _set_order(loader: Any, states: list[dict[str, Any]], is_within: bool) -> None:
    """Find the order again, of the epoch that the loop ``is_within``, or of the next one: a loop that calls ``set_epoch`` has
    done so already.
    """
    for part, state in zip(_parts(loader), states, strict=True):
        counts_itself = type(part).__qualname__ == "SeedableRandomSampler"
        for name, value in state.items():
            if name == "generator":
                if isinstance(
                    vars(part).get(name), torch.Generator
                ):  # else it is made and seeded when the epoch begins
                    vars(part)[name].set_state(value)
            elif name != "epoch" or is_within or counts_itself:
                setattr(part, name, value)


class Position:
    """The batches of one epoch after the other.

    Attributes:
        epoch: How many epochs are over.
        is_cut: Whether the loop has left its last epoch before the end.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.is_cut = False
        self._batches = 0  # of the present epoch that the loop has had
        self._is_within = False
        self._loader: Any = None  # of the present epoch, or the last one
        self._begin: dict[str, Any] = {}  # of the present epoch
        self._restored: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` takes."""
        if self._loader is None:
            begin: Any = None
        elif _has_state(self._loader):
            begin = {"loader": self._loader.state_dict()}
        else:
            begin = self._begin if self._is_within else {"order": _order_of(self._loader)}
        return {"epoch": self.epoch, "batches": self._batches, "is_within": self._is_within, "begin": begin}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there: the generators of the process are those of the last batch that was had."""
        self.epoch, self._restored = state["epoch"], None if state["begin"] is None else state

    def of(self, loader: Any) -> Iterator[Any]:
        """The batches of an epoch; of the first one after a restore, those that are left.

        Raises :class:`~hf_offload.errors.OffloadError` for a loader whose order could not be found again, and where the
        batches of another epoch are still asked for.
        """
        if self._is_within:
            raise OffloadError(
                "snapshots.batches() was called in the middle of an epoch, and a resume could not find its place in two "
                "loaders: use it for the training's one loader, and others, such as those of an evaluation, as they are."
            )
        problem = order_problem(loader)
        if problem is not None:
            raise OffloadError(f"A resume could not find its place in the data: {problem}. {_INSTEAD}.")
        self._loader, self._is_within, self.is_cut = loader, True, True
        try:
            for batch in self._resumed(loader) if self._restored is not None else self._begun(loader):
                self._batches += 1
                yield batch
            self.is_cut = False
        finally:
            self.epoch, self._batches, self._is_within = self.epoch + 1, 0, False

    def _begun(self, loader: Any) -> Iterator[Any]:
        if not _has_state(loader):
            self._begin = {"generators": process_states(), "order": _order_of(loader), "length": len(loader)}
        return iter(loader)

    def _resumed(self, loader: Any) -> Iterator[Any]:
        state, self._restored = self._restored, None
        assert state is not None
        begin, now = state["begin"], process_states()
        if ("loader" in begin) != _has_state(loader):
            raise OffloadError("The snapshot is of another kind of loader: resume with the one that it was taken with.")
        if "loader" in begin:
            loader.load_state_dict(begin["loader"])
            iterator = iter(loader)
            set_process_states(now)
            if not state["is_within"] and isinstance(loader, DataLoader):
                torch.empty((), dtype=torch.int64).random_()  # the seed of workers, which a new epoch draws
            self._batches = state["batches"]
            return iterator
        _set_order(loader, begin["order"], state["is_within"])
        if not state["is_within"]:
            return self._begun(loader)
        if begin["length"] != len(loader):
            raise OffloadError(
                f"The snapshot is of epochs of {begin['length']} batches, and this loader has {len(loader)}: resume with the "
                "data and batch size that it was taken with, or start from the beginning."
            )
        self._begin = begin
        set_process_states(begin["generators"])
        iterator = iter(loader)
        for _ in range(state["batches"]):  # in the order that they came in
            next(iterator)
        self._batches = state["batches"]
        set_process_states(now)
        return iterator
