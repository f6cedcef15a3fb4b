"""The processes of one run: what they share, and how they come to decisions that all of them follow.

Ranks must not differ in what they recompute: a recomputed block of a sharded model gathers its weights again, and a rank
that gathers alone waits for ever. Nor may each take the whole of a budget that is meant for the machine.
"""

import dataclasses
import datetime
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hf_offload.errors import OffloadConfigError, OffloadError
from hf_offload.plan.hardware import Hardware, Measurement
from hf_offload.planning.hardware import measure_hardware
from hf_offload.settings.schema import OffloadConfig, with_checked
from hf_offload.storage.opening import disk_options, drives_for

T = TypeVar("T")

# All of them attach at the same place of a script. Later, one may be writing a checkpoint.
_TO_MEET = datetime.timedelta(minutes=5)
_TO_ANSWER = datetime.timedelta(minutes=60)
# Settings of the machine: each of its processes gets a part.
_SHARED = ("ram_budget", "disk_budget", "max_disk_write_bytes", "max_step_write_bytes")


class Ranks:
    """All processes of the run. Every method that talks to the others is called by all of them, in the same order.

    They talk over a group of their own on the CPU (gloo), so that nothing waits for an accelerator. Without
    ``torch.distributed``, or with one process, there is no other process to talk to.

    Attributes:
        count: How many there are.
        local_count: How many of them are on this machine.
        is_first: Whether this is the one that speaks for all.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self.count = self.local_count = 1
        self.is_first = True
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self.count = dist.get_world_size()
        self.is_first = dist.get_rank() == 0
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


def agreed(config: OffloadConfig, ranks: Ranks) -> OffloadConfig:
    """This process's part of settings that all ranks have to agree on.

    Raises :class:`~hf_offload.errors.OffloadConfigError` on every rank if they do not.
    """
    if ranks.count == 1:
        return config
    _refuse_differences(ranks.gather(_compared(config)))
    parts: dict[str, Any] = {
        name: max(1, int(value) // ranks.local_count)
        for name in _SHARED
        if (value := getattr(config, name)) is not None
    }
    return with_checked(config, **parts)


def _compared(config: OffloadConfig) -> dict[str, Any]:
    # Machines may have their drives in different places.
    fields = (field.name for field in dataclasses.fields(OffloadConfig))
    return {name: getattr(config, name) for name in fields if name != "directory"}


def _refuse_differences(everyone: Sequence[dict[str, Any]]) -> None:
    problems = [
        f"{name}={everyone[0][name]!r} on rank 0, {other[name]!r} on rank {rank}"
        for rank, other in enumerate(everyone)
        for name in other
        if other[name] != everyone[0][name]
    ]
    if problems:
        raise OffloadConfigError(
            f"The processes of this run have different settings: {'; '.join(problems)}. Give all of them the same; "
            "a usual cause is a variable that is set on one machine only."
        )


def hardware_of_all(config: OffloadConfig, ranks: Ranks, device: torch.device) -> Hardware:
    """The machine that the plan of every process is made for: its part of the smallest one, within the settings' budgets.
    ``device`` is the model's.
    """
    directories = drives_for(config, device.type == "cpu")
    # The first one alone: side by side, each would see what the others leave. The others find what it has written down.
    options = disk_options(config)
    ranks.first(lambda: measure_hardware(directories, device, disk_options=options))
    hardware = measure_hardware(directories, device, disk_options=options).shared_by(ranks.local_count)
    hardware = ranks.largest(hardware, lambda one: -one.memory_bytes.value)
    room = dict(hardware.room_bytes)
    for tier, budget in (("ram", config.ram_budget), ("ssd", config.disk_budget)):
        if budget is not None and tier in room:
            room[tier] = Measurement(int(budget), "given")
    ring_bytes = hardware.ring_bytes if config.ring_bytes is None else int(config.ring_bytes)
    return dataclasses.replace(hardware, room_bytes=room, ring_bytes=ring_bytes)
