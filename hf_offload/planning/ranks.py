"""What the processes of one run share of a machine and of its budgets, so that all of them follow the same plan."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from hf_offload.errors import OffloadConfigError
from hf_offload.plan.hardware import Hardware, Measurement
from hf_offload.planning.hardware import measure_hardware
from hf_offload.ranks import Ranks
from hf_offload.settings.schema import OffloadConfig, with_checked
from hf_offload.storage.opening import disk_options, drives_for

# Settings of the machine: each of its processes gets a part.
_SHARED = ("ram_budget", "disk_budget", "max_disk_write_bytes", "max_step_write_bytes")


def agreed(config: OffloadConfig, ranks: Ranks) -> OffloadConfig:
    """This process's part of settings that all ranks have to agree on.

    Raises :class:`~hf_offload.errors.OffloadConfigError` on every rank if they do not.
    """
    if ranks.count == 1:
        return config
    _refuse_differences(ranks.gather(_compared(config)))
    return part_of(config, ranks.local_count)


def part_of(config: OffloadConfig, count: int) -> OffloadConfig:
    """That of one of ``count`` processes on a machine."""
    parts: dict[str, Any] = {
        name: max(1, int(value) // count) for name in _SHARED if (value := getattr(config, name)) is not None
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
