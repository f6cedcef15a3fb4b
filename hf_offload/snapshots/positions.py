"""Where a loop is in its data: which batches it has had of an epoch, and what the epoch's order was drawn from."""

from collections.abc import Iterator
from typing import Any

import torch

from hf_offload.errors import OffloadError
from hf_offload.snapshots.contents import random_states, restore_random_states

_COUNTERS = ("iteration", "epoch")
"""Of loaders of accelerate, and of samplers that shuffle by the number of the epoch."""


class Position:
    """The batches of one epoch after the other.

    Attributes:
        epoch: How many epochs are over.
        batches: How many batches of the present one the loop has had.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0
        self._begin: dict[str, Any] | None = None  # of the epoch
        self._restored: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` takes."""
        return {"epoch": self.epoch, "batches": self.batches, "begin": self._begin}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there: generators are those of the last batch that was had."""
        self.epoch = state["epoch"]
        self._restored = state

    def of(self, loader: Any) -> Iterator[Any]:
        """The batches of an epoch; of the first one after a restore, those that are left.

        Raises :class:`~hf_offload.errors.OffloadError` where the batches of another epoch are still asked for, and for a
        loader whose workers persist.
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
        restored, self._restored = self._restored, None
        skipped, now = 0, None
        if restored is None or restored["begin"] is None:
            self._begin = {"generators": random_states(), "loader": _states_of(loader)}
        else:
            self._begin, skipped, now = restored["begin"], restored["batches"], random_states()
            restore_random_states(self._begin["generators"])
            _restore(loader, self._begin["loader"])
        self.batches = skipped
        iterator = iter(loader)
        for _ in range(skipped):  # in the order that they came in
            next(iterator)
        if now is not None:
            restore_random_states(now)
        try:
            for batch in iterator:
                self.batches += 1
                yield batch
        finally:
            self.epoch, self.batches, self._begin = self.epoch + 1, 0, None


def _parts_of(loader: Any) -> list[Any]:
    """The loader and its samplers, in wrappers such as accelerate's."""
    found: list[Any] = []
    waiting = [loader]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is each for each in found):
            continue
        found.append(part)
        waiting += [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
    return found


def _states_of(loader: Any) -> list[dict[str, Any]]:
    states = []
    for part in _parts_of(loader):
        own = getattr(part, "__dict__", {})  # a list of batches has none
        state: dict[str, Any] = {name: own[name] for name in _COUNTERS if isinstance(own.get(name), int)}
        generator = own.get("generator")
        if isinstance(generator, torch.Generator):
            state["generator"] = generator.get_state()
        states.append(state)
    return states


def _restore(loader: Any, states: list[dict[str, Any]]) -> None:
    for part, state in zip(_parts_of(loader), states, strict=True):
        for name, value in state.items():
            if name == "generator":
                part.generator.set_state(value)
            else:
                setattr(part, name, value)
