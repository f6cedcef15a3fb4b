"""A module whose forward is somebody else's for a while."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class ReplacedForward(ABC):
    """Puts :meth:`forward` in the place of a module's own; ``name`` is the module's.

    It lives as long as the module does, which holds it for its forward. Who takes it off again keeps a weak reference.
    """

    def __init__(self, name: str, module: nn.Module):
        self.name = name
        self.module = module
        self.own_forward: Any = None
        self._was_there = False

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module does instead; ``own_forward`` is what it did."""

    def install(self) -> None:
        """Replace the module's forward. Its hooks stay as they are."""
        # accelerate puts its own there, too.
        self._was_there = "forward" in self.module.__dict__
        self.own_forward = self.module.forward
        self.module.forward = self.forward

    def remove(self) -> None:
        """Give the module its forward back."""
        if self._was_there:
            self.module.forward = self.own_forward
        else:
            self.module.__dict__.pop("forward", None)
