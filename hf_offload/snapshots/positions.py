"""Where a loop is in its data: which batches it has had of an epoch, and what the epoch's order was drawn from."""

import contextlib
from collections.abc import Iterator
from typing import Any

from hf_offload.errors import OffloadError
from hf_offload.generators import process_states, set_process_states
from hf_offload.snapshots.likeness import warn_of_other_data
from hf_offload.snapshots.samplers import data_of, restore, states_of, unrepeatable

_END = object()


class Position:
    """The batches of one epoch after the other.

    Attributes:
        epoch: How many epochs are over.
        batches: How many batches of the present one the loop has had.
        is_cut: Whether the loop has left an epoch before its end: the present one, or the last.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0
        self.is_cut = False
        self._begin: dict[str, Any] | None = None  # of the epoch
        self._restored: dict[str, Any] | None = None
        self._loader: Any = None  # of the epoch, or the last one
        self._extent: dict[str, int] = {}
        self._data: dict[str, str] | None = None  # its samplers', when the epoch began

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` takes."""
        between = states_of(self._loader) if self._begin is None and self._loader is not None else None
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "begin": self._begin,
            "between": between,
            "extent": self._extent,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there: generators are those of the last batch that was had."""
        self.epoch = state["epoch"]
        self._restored = state

    def of(self, loader: Any) -> Iterator[Any]:
        """The batches of an epoch; of the first one after a restore, those that are left.

        Raises :class:`~hf_offload.errors.OffloadError` where the batches of another epoch are still asked for, for a
        loader whose workers persist, and for a sampler whose order cannot be repeated.
        """
        if self._begin is not None:
            raise OffloadError(
                "snapshots.batches() was called in the middle of an epoch, and a resume could not find its place in two "
                "loaders: use it for the training's one loader, and others, such as those of an evaluation, as they are."
            )
        if getattr(loader, "persistent_workers", False):
            raise OffloadError(
                "persistent_workers=True: such workers draw random numbers in a training's first epoch only, so a run that "
                "resumes would see other batches. Leave it out of the DataLoader."
            )
        data = data_of(loader)
        before, self._data = self._data or data, data
        changed = sorted(name for name, digest in data.items() if before.get(name, digest) != digest)
        problem = f"{changed[0]} has changed since the last epoch" if changed else unrepeatable(loader)
        if problem is not None:
            raise OffloadError(
                f"A resume could not find its place in the data: {problem}. Let it draw its order when its iteration "
                "begins, or from a generator that is an attribute of it."
            )
        restored, self._restored = self._restored, None
        self._loader, skipped, now = loader, 0, None
        if restored is not None and restored["between"] is not None:
            restore(loader, restored["between"])
        if restored is None or restored["begin"] is None:
            self._begin = {"generators": process_states(), "loader": states_of(loader)}
        else:
            self._begin, skipped, now = restored["begin"], restored["batches"], process_states()
            set_process_states(self._begin["generators"])
            restore(loader, self._begin["loader"])
        self.batches, self.is_cut = skipped, True
        self._extent = _extent_of(loader)
        if skipped and restored is not None:
            warn_of_other_data(restored["extent"], self._extent, "The snapshot that training goes on from")
        iterator = iter(loader)
        for number in range(skipped):  # in the order that they came in
            if next(iterator, _END) is _END:
                raise OffloadError(
                    f"The snapshot is of an epoch of which {skipped} batches were had, and this loader has {number}: resume "
                    "with the data and batch size that it was taken with, or start from the beginning."
                )
        if now is not None:
            set_process_states(now)
        try:
            for batch in iterator:
                self.batches += 1
                yield batch
            self.is_cut = False
        finally:
            self.epoch, self.batches, self._begin = self.epoch + 1, 0, None


def _extent_of(loader: Any) -> dict[str, int]:
    """How many batches and rows a loader has, as far as it can say so."""
    found: dict[str, int] = {}
    part: Any
    for name, part in (("number of batches", loader), ("number of rows", getattr(loader, "dataset", None))):
        with contextlib.suppress(TypeError, NotImplementedError):
            found[name] = len(part)
    size = getattr(loader, "batch_size", None)
    return found | ({"batch_size": size} if isinstance(size, int) else {})
