"""What a parameter waits for, which is noted on the parameter itself."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import nn

from hf_offload.interrupts import signals_deferred
from hf_offload.parameters.casts import fill_cast, has_casts, keep_casts
from hf_offload.parameters.changes import Call, changes_arguments
from hf_offload.parameters.hooks import saving_hooks
from hf_offload.parameters.saved import Former, Residence


class Demand(Protocol):
    """What a demanded parameter is waiting for."""

    @property
    def has_gradient(self) -> bool:
        """Whether it has a gradient that is elsewhere."""
        ...

    def finish(self) -> None:
        """The parameter is about to be used: its update has to come first."""

    def overwrite(self) -> None:
        """The parameter is about to get another value, whatever it was."""

    def check_gradient(self) -> None:
        """``.grad`` is about to be read for its values."""

    def reveal_gradient(self) -> None:
        """``.grad`` is about to be read: put it there."""

    def replace_gradient(self, zeros: bool) -> None:
        """``.grad`` is about to be written, or set to zeros, and what it was does not matter."""


# They belong to the parameter, so that the garbage collector finds both: what they refer to may refer to the parameter.
_REFERENCES_OF_FORMER = 2
"""That of the residence, and that of the call that counts."""
DEMAND = "_hf_offload_demand"
RESIDENCE = "_hf_offload_residence"


def demand_of(parameter: nn.Parameter) -> Demand | None:
    """What the parameter is waiting for."""
    return vars(parameter).get(DEMAND)


def residence_of(parameter: nn.Parameter) -> Residence | None:
    """Where the parameter's memory comes from, if it comes and goes."""
    return vars(parameter).get(RESIDENCE)


def complete(parameter: nn.Parameter) -> None:
    """Compute the update that ``parameter`` waits for, if it does."""
    demand = demand_of(parameter)
    if demand is not None:
        demand.finish()


def about_to_change(parameter: nn.Parameter) -> None:
    """``parameter`` gets another value later, which counts as a change from now on: graphs keep their casts of this one."""
    if has_casts(parameter):
        with in_memory([parameter]):
            pass


@contextlib.contextmanager
def other_memory(parameter: nn.Parameter) -> Iterator[None]:
    """``parameter`` is given other memory inside the block: views that graphs need keep the former one, as in memory."""
    residence = residence_of(parameter)
    if residence is None or sys.getrefcount(residence.former) <= _REFERENCES_OF_FORMER:
        yield
        return
    complete(parameter)
    with in_memory([parameter]), torch._C.DisableTorchFunctionSubclass():
        kept = parameter.detach()
    yield
    with torch._C.DisableTorchFunctionSubclass():
        is_same = parameter.untyped_storage()._cdata == kept.untyped_storage()._cdata
        is_same = is_same and parameter.storage_offset() == kept.storage_offset()
    if not is_same:
        residence.former.kept = kept
        residence.former = Former()


@contextlib.contextmanager
def in_memory(parameters: Iterable[nn.Parameter], changed: bool = False, call: Call | None = None) -> Iterator[None]:
    """Let the memory of ``parameters`` be there inside the block, which may have ``changed`` it in a way that does not show.
    What autograd saves of it inside the block does not hold it. The block is a ``call``, or something that is not known.
    """
    residents = [(each, found) for each in parameters if (found := residence_of(each)) is not None]
    if not residents:
        yield
        return
    entered: list[Residence] = []
    cast: list[tuple[nn.Parameter, Residence]] = []
    try:
        with signals_deferred:  # but where one of them waits for the drive
            for parameter, residence in residents:
                residence.enter()
                entered.append(residence)
                if fill_cast(parameter):
                    cast.append((parameter, residence))
            if cast and (changed or call is None or changes_arguments(call)):
                for parameter, _ in cast:
                    keep_casts(parameter)
        with saving_hooks([parameter for parameter, _ in residents]):
            yield
        for parameter, residence in cast:
            if residence.is_held:  # by others that may write there
                keep_casts(parameter)
    finally:
        try:
            _leave(entered, changed)
        except BaseException:  # a signal came before it began
            _leave(entered, changed)
            raise


def _leave(entered: list[Residence], changed: bool) -> None:
    with signals_deferred:
        while entered:
            entered.pop().leave(changed)
