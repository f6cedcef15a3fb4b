"""The states of one optimizer's parameters between updates, on a tier."""

import threading
from typing import Any

from torch import Tensor

from hf_offload.optimizers.streamed.contexts import outside
from hf_offload.optimizers.streamed.parts import joined, split
from hf_offload.optimizers.streamed.record import PartState, Record
from hf_offload.optimizers.streamed.stored import Store


class States:
    """What happens to them; ``lock`` is held by all calls.

    Attributes:
        store: Where they go.
    """

    def __init__(self, store: Store, lock: "threading.RLock"):
        self.store = store
        self._lock = lock

    def get(self, record: Record, parameter: Tensor, last: bool) -> dict[str, Any]:
        """A copy of the state of the whole parameter. The ``last`` time, it is gone from here.

        Raises :class:`~hf_offload.errors.StorageError` if it cannot be read: then it still is here.
        """
        with self._lock, outside():
            found = [state.take(parameter.device, last=False)[0] or {} for state in record.states]
            whole = joined(found, record)
            if last:
                self.forget(record)
            return whole

    def put(self, record: Record, parameter: Tensor, state: dict[str, Any]) -> None:
        """Let ``state`` of the whole parameter take the place of what is here."""
        with self._lock, outside():
            self.forget(record)
            for number, part in enumerate(split(state, record)):
                record.states[number].put(part, None, None, self.store, parameter.device)
            record.moved = True

    def forget(self, record: Record) -> None:
        """Drop the state of a parameter."""
        with self._lock:
            record.states = [PartState() for _ in record.states]
            record.moved = False
