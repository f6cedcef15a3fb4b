"""The table of usages: each is a function that trains in some way that public programs have, and logs what it computes."""

import dataclasses
from collections.abc import Callable

from tests.helpers.train import Run


@dataclasses.dataclass(frozen=True)
class Usage:
    """A usage, and which promises of :class:`~hf_offload.session.OffloadSession` its loop keeps."""

    function: Callable[[Run], None]
    program: str
    """Who does it."""
    defers: bool
    """Updates may wait for the next forward: nothing reads weights in between that no subclass of tensors is asked about."""
    in_backward: bool
    """Updates may come in backward: there is one a step, and nothing reads or changes gradients or options."""
    steps: bool
    """An optimizer steps: there is state."""
    holds: bool
    """Others hold the memory of weights, which then stay."""


USAGES: dict[str, Usage] = {}


def usage(
    program: str, *, defers: bool = True, in_backward: bool = False, steps: bool = True, holds: bool = False
) -> Callable[..., Callable[[Run], None]]:
    """Adds a function to the table, by its name."""

    def add(function: Callable[[Run], None]) -> Callable[[Run], None]:
        assert function.__name__ not in USAGES, function.__name__
        USAGES[function.__name__] = Usage(function, program, defers, in_backward, steps, holds)
        return function

    return add
