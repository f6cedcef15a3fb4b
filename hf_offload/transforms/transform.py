"""The interface of transforms."""

import logging
import weakref
from abc import ABC, abstractmethod
from typing import Protocol

from torch import nn

from hf_offload.surgery import ReplacedForward

logger = logging.getLogger(__name__)


class Removable(Protocol):
    """The handle of a hook, or an :class:`~hf_offload.surgery.Undo`."""

    def remove(self) -> None:
        """Revert the change."""
        ...


class Transform(ABC):
    """A change of one model, held weakly: made by :meth:`apply`, reverted by :meth:`remove`.

    What one transform needs of another is an argument of its constructor (``order.py``).
    """

    def __init__(self, model: nn.Module):
        self._model_ref = weakref.ref(model)
        self._changes: list[tuple[str | None, Removable]] = []  # modules by name, hooks of the model without

    @abstractmethod
    def apply(self) -> None:
        """Apply the change, if the settings ask for it.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if that cannot be done.
        """

    def remove(self) -> None:
        """Revert all changes, the last one first. Idempotent."""
        while self._changes:
            self._changes.pop()[1].remove()

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that are changed."""
        return tuple(name for name, _ in self._changes if name is not None)

    @property
    def model(self) -> nn.Module:
        """The model, which must still be there."""
        model = self._model_ref()
        assert model is not None, "a transform is asked while its model is trained"
        return model

    def replace(self, forward: ReplacedForward) -> None:
        """Put ``forward`` in the place of its module's own."""
        self._changes.append((forward.name, forward.install()))

    def note(self, change: Removable, name: str | None = None) -> None:
        """Take ``change``, of the module of that name or a hook of the model, back in :meth:`remove`."""
        self._changes.append((name, change))

    @property
    def is_checkpointed(self) -> bool:
        """Whether the model recomputes blocks in backward by itself."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())

    def warn_if_checkpointed(self, what: str) -> None:
        """Log that ``what`` saves no memory if the model recomputes its blocks."""
        if self.is_checkpointed:
            logger.warning(
                "Activation checkpointing keeps nothing of a block but its input, so %s no memory: drop one of them.",
                what,
            )
