"""What an interrupted step, or an error in one, may leave half done."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from hf_offload.errors import OffloadError
from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.streamed.record import LostGradient, Record


class Finishing(Protocol):
    """Computes what parameters wait for."""

    def finish_record(self, record: Record) -> None:
        """Compute the update of one parameter."""


class Damage:
    """Why the states of one optimizer are not those of any step, if they are not."""

    def __init__(self) -> None:
        self._why = ""

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """What is loaded inside is the state of one step only once all of it is."""
        self._why = (
            "Loading the optimizer's state was not completed: call load_state_dict() again, with that of a checkpoint."
        )
        yield
        self._why = ""

    def check_step(self, records: Iterable[Record]) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` if no step can begin: nothing has changed then."""
        self._check()
        for record in records:
            if isinstance(record.gradient, LostGradient):
                raise record.gradient.error

    def check_states(self, records: Iterable[Record]) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` if the states are not those of any step."""
        self._check()
        for record in records:
            record.check_stepped()

    def _check(self) -> None:
        if self._why:
            raise OffloadError(self._why)

    def overwrite(self, record: Record, streaming: Finishing) -> None:
        """A parameter is about to get another value. An update of it that cannot be completed is forgotten; the optimizer's
        state is damaged then, until it is loaded, too.
        """
        try:
            streaming.finish_record(record)
            record.check_stepped()
        except OffloadError as error:
            parameter = record.parameter_ref()
            with signals_deferred:
                self._why = (
                    "Weights were loaded after a step that was not completed, and the optimizer's state is still what that "
                    f"step has left: load it from the checkpoint, too (load_state_dict). {error}"
                )
                record.update = record.spent_norm = None
                if parameter is not None:
                    record.refresh(parameter)
