"""One parameter of an optimizer whose state leaves memory: what it owes, and what backward has done with it."""

import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from hf_offload.errors import OffloadError
from hf_offload.interrupts import signals_deferred
from hf_offload.state import guard
from hf_offload.state.gradients import parked_gradient
from hf_offload.state.registry import parked_of
from hf_offload.state.units import unit_with
from hf_offload.state.update import Update

if TYPE_CHECKING:
    from hf_offload.state.step import Streaming


_CHECKPOINT = CheckpointFunction.backward.__code__
_UPDATE_LATER = "go on from the last checkpoint, without update_in_backward."


class _OwedByOthers(guard.Debt):
    """What the gradient and the state of a parameter owe. C++ holds gradients, too, so that the garbage collector would take
    what they refer to for being in use.
    """

    def __init__(self, trained: "StreamedParameter"):
        self._trained = weakref.ref(trained)

    def settle(self, unseen: bool) -> None:
        trained = self._trained()
        if trained is not None:
            trained.settle(unseen)


class StreamedParameter(guard.Debt):
    """One parameter of one optimizer.

    Attributes:
        name: For messages.
        update: What it owes.
        of_others: What its gradient and state owe with it.
        is_read: All that its update needs was read ahead, or asked for.
        norm_in_backward: 2-norm of the gradient that it was updated with in this step's backward.
    """

    def __init__(self, parameter: nn.Parameter, name: str, streaming: "Streaming"):
        self.name = name
        self.streaming = streaming
        self.parameter_ref = weakref.ref(parameter)
        self.update: Update | None = None
        self.of_others = _OwedByOthers(self)
        self.norm_in_backward: Tensor | None = None
        self.options_in_backward: dict[str, Any] = {}
        self.is_read = False
        self.has_one_gradient = False
        self.gradients_in_backward = 0
        self.layout: Any = None  # in the last step

    # -- what the parameter's unit and guards ask ---------------------------------------------------------------------------

    def settle(self, unseen: bool) -> None:
        """See :class:`~hf_offload.state.guard.Debt`."""
        parameter = self.parameter_ref()
        found = None if parameter is None else unit_with(parameter)
        if found is not None and self.update is not None:
            found[0].complete(found[1])
        self.finish()
        self.check_stepped()

    def finish(self) -> None:
        """Compute the update that is owed, if one is."""
        self.streaming.finish([self])

    @signals_deferred
    def read_ahead(self, update: Update | None = None, part: int = 0) -> bool:
        """Begin to read what its update needs, or this ``part`` of it; false if the window has no room."""
        if update is None and (self.is_read or not (self.update or self.streaming.in_backward)):
            return True
        update, parameter = update or self.update, self.parameter_ref()
        if parameter is None:
            return True
        needed = [p for t in self.streaming.state_tensors(parameter) if (p := parked_of(t)) is not None]
        gradient = None if update is None else parked_gradient(update.gradient)
        needed += [] if gradient is None else [gradient]
        spans = self.streaming.spans(parameter, update)
        if spans is None:
            self.is_read = all(one.read_ahead() for one in needed)
            return self.is_read
        part = max(part, 0 if update is None else update.done)
        if part >= len(spans):
            return True
        begin, end = spans[part]
        ratios = [one.nbytes // parameter.nbytes for one in needed]
        return all(one.read_ahead(begin * by, (end - begin) * by) for one, by in zip(needed, ratios, strict=True) if by)

    # -- updates in backward ------------------------------------------------------------------------------------------------

    def check_stepped(self) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` for a parameter that was updated in a backward without a step."""
        if self.norm_in_backward is not None:
            raise OffloadError(
                f"{self.name} was updated in a backward that no step of the optimizer has followed, so that the weights are "
                "those of half a step: go on from the last checkpoint. If backward was not interrupted, something reads "
                "weights before the step: leave update_in_backward out."
            )

    def overwritten(self) -> None:
        """See :class:`~hf_offload.state.units.OwedUpdate`: a value that is loaded is not that of half a step."""
        self.end_backward()

    def check_step(self, options: dict[str, Any]) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` where a step with these ``options`` would not do what backward has
        done.
        """
        if self.norm_in_backward is None:
            return
        before = self.options_in_backward
        changed = [name for name in {**before, **options} if not _are_same(before.get(name), options.get(name))]
        if changed:
            raise OffloadError(
                f"The optimizer's {', '.join(changed)} changed between a backward, which has updated {self.name}, and its "
                f"step: {_UPDATE_LATER}"
            )

    def end_backward(self) -> None:
        """What was updated in backward belongs to a step now."""
        parameter = self.parameter_ref()
        if self.norm_in_backward is not None and parameter is not None:
            guard.lift(parameter, self)
        self.norm_in_backward = None
        if self.gradients_in_backward:
            self.gradients_in_backward, self.has_one_gradient = 0, self.gradients_in_backward == 1


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def is_whole_gradient(trained: StreamedParameter) -> bool:
    """Whether this gradient is all that backward adds up, also of a block that reentrant checkpoints use more than once: the
    first step shows it.
    """
    if not _is_in_checkpoint():
        return True
    trained.gradients_in_backward += 1
    return trained.has_one_gradient


def _is_in_checkpoint() -> bool:
    """Whether a backward inside of the backward is on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CHECKPOINT:
        frame = frame.f_back
    return frame is not None
