"""Weights that stay in memory: all of them move at once."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_offload.errors import OffloadError
from hf_offload.optimizers.mezo.directions import Directions, Shift, Update

logger = logging.getLogger(__name__)


class AtOnce:
    """Moves ``weights``, by name, which are in memory. Between steps it holds no memory.

    Attributes:
        parameters: The weights.
        is_changing: Some weights have changed and others have not: after an error of a device that stays so.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter]):
        self.parameters = list(weights.values())
        self.is_changing = False
        self._names = list(weights)
        self._has_warned = False
        self._directions: Directions | None = None
        self._kept: list[Tensor] | None = None

    def begin_step(self) -> None:
        """Take the memory that the moves of a step need."""
        self._directions = Directions(self.parameters)

    def keep_here(self) -> None:
        """Weights can be as they are now again (:meth:`undo`)."""
        self._kept = [one.detach().clone() for one in self.parameters]

    def move(self, shift: Shift) -> None:
        """Let all weights make this move."""
        directions = self._directions or Directions(self.parameters)
        with self._changing():
            directions.move(self.parameters, shift)

    def update(self, updates: Sequence[Update]) -> None:
        """Let each weight make its update."""
        directions = Directions(self.parameters)
        with self._changing():
            directions.update(self.parameters, updates)

    def undo(self) -> None:
        """Let weights be as they were at :meth:`keep_here`."""
        assert self._kept is not None
        with self._changing():
            for one, before in zip(self.parameters, self._kept, strict=True):
                one.detach().copy_(before)

    def go_on(self) -> None:
        """Weights need not be as they were."""

    def end_step(self) -> None:
        """Give the memory back."""
        self._directions = self._kept = None

    def check(self) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` after an error that came while weights changed."""
        if self.is_changing:
            raise OffloadError(
                "An earlier error came while MeZO changed weights: some have changed and others have not. Load a checkpoint "
                "into the model, and make a new optimizer."
            )

    @contextlib.contextmanager
    def casting(self) -> Iterator[None]:
        """Autocast may keep copies of weights until they move."""
        yield

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A loss is computed: say, once, that the model changes its weights meanwhile."""
        with torch._C.DisableTorchFunctionSubclass():
            before = [one._version for one in self.parameters]
            yield
            changed = [one._version != version for one, version in zip(self.parameters, before, strict=True)]
        if any(changed) and self._kept is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The model changes %s of its weights in place while it computes a loss, such as %s; Embedding(max_norm=...) "
                "and RWKV's rescale_every do that. MeZO goes on from what they are then, and its log cannot rebuild them.",
                sum(changed),
                self._names[changed.index(True)],
            )

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self.is_changing = True
        yield
        self.is_changing = False
        torch.clear_autocast_cache()  # or an autocast around the step would go on with weights as they were
