"""The processes of one run, and how they talk to each other.

Note: why they talk at all
    Ranks must not differ in what they recompute: a recomputed block of a sharded model gathers its weights again, and a rank
    that gathers alone waits for ever. Nor may each take the whole of a budget that is meant for the machine, or go on from
    another snapshot than the others.
"""

import datetime
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from hf_offload.errors import OffloadConfigError, OffloadError

T = TypeVar("T")

# All of them attach at the same place of a script. Later, one may be writing a checkpoint.
_TO_MEET = datetime.timedelta(minutes=5)
_TO_ANSWER = datetime.timedelta(minutes=60)


class Ranks:
    """All processes of the run. Every method that talks to the others is called by all of them, in the same order.

    They talk over a group of their own on the CPU (gloo), so that nothing waits for an accelerator. Without
    ``torch.distributed``, or with one process, there is no other process to talk to.

    Attributes:
        count: How many there are.
        local_count: How many of them are on this machine.
        number: That of this one.
        is_first: Whether this is the one that speaks for all.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self.count = self.local_count = 1
        self.number, self.is_first = 0, True
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self.count = dist.get_world_size()
        self.number = dist.get_rank()
        self.is_first = self.number == 0
        _meet()
        self._group = dist.new_group(backend="gloo", timeout=_TO_ANSWER)
        self.local_count = self.gather(socket.gethostname()).count(socket.gethostname())

    def gather(self, value: T) -> list[T]:
        """Everybody's ``value``, by rank."""
        if not self.connected:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    def first(self, compute: Callable[[], T]) -> T:
        """What ``compute`` returns, or raises, in the first process; the others do not call it."""
        if not self.connected:
            return compute()
        answer: list[Any] = [None]
        if self.is_first:
            try:
                answer = [(compute(), None)]
            except OffloadError as error:
                answer = [(None, error)]
        dist.broadcast_object_list(answer, src=0, group=self._group)
        value, refusal = answer[0]
        if refusal is not None:
            raise refusal
        return value

    def each(self, compute: Callable[[], T]) -> T:
        """What ``compute`` returns, in each process. An error that it raises in one is raised in all of them."""
        value: Any = None
        own: OffloadError | None = None
        try:
            value = compute()
        except OffloadError as error:
            own = error
        errors = self.gather(own)
        if own is not None:
            raise own
        for rank, other in enumerate(errors):
            if other is not None:
                raise type(other)(f"Rank {rank}: {other}")
        return value

    def exchange(self, rows: Tensor) -> Tensor:
        """Row ``r`` is what rank ``r`` has sent to this one, whose own row ``r`` went to rank ``r``."""
        received = rows.new_empty(rows.shape)
        dist.all_to_all_single(received, rows, group=self._group)
        return received

    def copy_first(self, tensor: Tensor) -> None:
        """``tensor``, on the CPU, becomes that of the first process."""
        dist.broadcast(tensor, src=0, group=self._group)

    def collect(self, row: Tensor, to: int) -> list[Tensor]:
        """The rows of all, by rank, in the process ``to``; nothing in the others."""
        rows = [row.new_empty(row.shape) for _ in range(self.count)] if self.number == to else []
        dist.gather(row, rows or None, dst=to, group=self._group)
        return rows

    def largest(self, value: T, size: Callable[[T], float]) -> T:
        """The ``value`` of the process where it has the largest ``size``."""
        if not self.connected:
            return value
        sizes = self.gather(size(value))
        owner = sizes.index(max(sizes))
        answer: list[Any] = [value if dist.get_rank() == owner else None]
        dist.broadcast_object_list(answer, src=owner, group=self._group)
        return answer[0]

    @property
    def connected(self) -> bool:
        """Whether there are others, and they can be talked to."""
        return self._group is not None and dist.is_initialized()

    def close(self) -> None:
        """Give the group up. Idempotent, and no talking."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _meet() -> None:
    """Raises :class:`~hf_offload.errors.OffloadConfigError` if the other processes do not come."""
    try:
        group = dist.new_group(backend="gloo", timeout=_TO_MEET)
        dist.monitored_barrier(group)
    except RuntimeError as error:
        raise OffloadConfigError(
            f"Rank {dist.get_rank()} waited {_TO_MEET.total_seconds():.0f} s for the other {dist.get_world_size() - 1} "
            "processes to enable offloading: enable it in all of them, or in none."
        ) from error
    dist.destroy_process_group(group)
