"""The states of one optimizer's parameters between updates, on a tier."""

import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.streamed.parts import joined, split
from hf_offload.optimizers.streamed.record import PartState, Record
from hf_offload.parameters.contexts import outside
from hf_offload.storage.stored import Store


class States:
    """What happens to them; ``lock`` is held by all calls.

    Attributes:
        store: Where they go.
    """

    def __init__(self, store: Store, lock: "threading.RLock"):
        self.store = store
        self._lock = lock

    def get(self, record: Record, parameter: Tensor) -> dict[str, Any]:
        """A copy of the state of the whole parameter.

        Raises :class:`~hf_offload.errors.StorageError` if it cannot be read.
        """
        with self._lock, outside():
            found = [state.take(parameter.device, last=False)[0] or {} for state in record.states]
            return joined(found, record)

    def parts(self, record: Record, parameter: Tensor) -> Iterator[dict[str, Any]]:
        """The state of one part after the other, each until the next one is asked for."""
        for state in record.states:
            with self._lock, outside():
                found = state.take(parameter.device, last=False)[0] or {}
            yield found

    def put(self, record: Record, parameter: Tensor, state: dict[str, Any]) -> None:
        """Let ``state`` of the whole parameter take the place of what is here, once all of it is on its way."""
        with self._lock, outside():
            states = [PartState() for _ in record.states]
            for each, part in zip(states, split(state, record), strict=True):
                each.put(part, None, None, self.store, parameter.device)
                each.send()
                self.store.throttle()
            with signals_deferred:
                record.states = states
                record.moved = True

    def forget(self, record: Record) -> None:
        """Drop the state of a parameter."""
        with self._lock, signals_deferred:
            record.states = [PartState() for _ in record.states]
            record.moved = False
