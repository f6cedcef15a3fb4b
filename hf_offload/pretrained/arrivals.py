"""Parameters that come to the modules of a model that is being made, and leave memory before the next ones come."""

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from hf_offload.allocator import release_free_memory
from hf_offload.errors import OffloadConfigError, StorageError
from hf_offload.planning.ranks import part_of
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.sizes import format_bytes
from hf_offload.state.refusals import refuse_processes
from hf_offload.state.weights import Weights, memory_for_weights, open_weights, place_for, settle, weight_may_leave
from hf_offload.storage.file_systems import free_disk_bytes
from hf_offload.storage.opening import named_directories
from hf_offload.storage.service import RunStorage, share_storage

logger = logging.getLogger(__name__)

_RELEASED_BYTES = 128 << 20
"""After so many bytes of weights, the allocator gives back what they leave: blocks of all sizes between those in use."""


class Arrivals:
    """Parks each parameter that this thread gives to a module inside the block, before the module has it.

    Parameters on the meta device say what is to come: they decide about ``params="auto"``, and whether the drive has room.

    Args:
        config: Its ``params`` is not "none".
        name: Of the model, for messages.
        report: Called with the bytes that have arrived and those that are expected.
    """

    def __init__(self, config: OffloadConfig, name: str, report: Callable[[int, int], None]):
        self._config = config
        self._name = name
        self._report = report
        self._expected_bytes = 0
        self._largest_bytes = 0
        self._arrived_bytes = 0
        self._held_bytes = 0
        self._place: str | None = None
        self._residency: Weights | None = None
        self._storage = RunStorage()
        self._handle: RemovableHandle | None = None
        self._thread = threading.get_ident()

    def __enter__(self) -> "Arrivals":
        self._handle = register_module_parameter_registration_hook(self._arrive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._handle is not None
        self._handle.remove()

    def settle(self, model: nn.Module) -> None:
        """The model is complete: as many of its weights are in memory as fit from now on."""
        if self._residency is None:
            return  # "auto" leaves them in memory, or the model is a sketch on the meta device
        share_storage(model, self._storage)
        settle(model, self._residency, self._config)
        self._check_room()
        self._residency.tell()

    def _arrive(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if threading.get_ident() != self._thread:
            return
        if parameter.is_meta:
            self._expected_bytes += parameter.nbytes
            self._largest_bytes = max(self._largest_bytes, parameter.nbytes)
            return
        if self._place is None:
            self._choose(parameter.device.type == "cpu")
        if self._residency is None or not weight_may_leave(parameter, self._config):
            return
        if parameter.untyped_storage().nbytes() != parameter.nbytes:
            parameter.data = (
                parameter.data.clone()
            )  # a part of a tensor that was split, and would stay in memory for it
        self._residency.take_in(f"{type(module).__name__}.{name}", parameter, self._config)
        self._check_room()
        self._arrived_bytes += parameter.nbytes
        self._held_bytes += parameter.nbytes
        if self._held_bytes >= _RELEASED_BYTES:
            self._held_bytes = 0
            release_free_memory()
        self._report(self._arrived_bytes, max(self._arrived_bytes, self._expected_bytes))

    def _choose(self, on_host: bool) -> None:
        config = self._config
        processes = _launched_processes()
        place = "none" if processes > 1 and config.params is None else config.weights_place
        if place == "auto":
            place = place_for("params", "weights", self._expected_bytes, config, on_host)
        self._place = place
        if place == "none":
            return
        refuse_processes(config, processes, on_host)
        local = min(processes, int(os.environ.get("LOCAL_WORLD_SIZE") or processes))
        config = self._config = part_of(config, local)
        self._storage.begin_run(config, on_host, processes=local)
        limit_bytes = memory_for_weights(config)
        if place == "ssd":
            self._check_drive(limit_bytes)
        self._residency = open_weights(config, place, self._storage, on_host, limit_bytes, self._largest_bytes)
        self._residency.is_home = True

    def _check_drive(self, limit_bytes: int) -> None:
        config = self._config
        directories = named_directories(config)
        free = free_disk_bytes(directories)
        if config.disk_budget is not None:
            free = min(free, int(config.disk_budget))
        # A tied weight is expected twice, and is usually the largest one.
        needed = self._expected_bytes - self._largest_bytes - limit_bytes - (self._storage.ram.limit_bytes or 0)
        if needed > free:
            where = ", ".join(map(str, directories))
            raise OffloadConfigError(
                f"The weights of {self._name} take {format_bytes(self._expected_bytes)}, and of {where}, "
                f"{format_bytes(free)} may be used: free some space there, name another directory, or raise disk_budget."
            )

    def _check_room(self) -> None:
        assert self._residency is not None
        refusal = self._residency.store.refusal
        if refusal is not None:
            raise StorageError(
                f"{self._name} is not loaded, for the tier cannot take all of its weights: {refusal} Nothing was changed; "
                "the room that was taken is free again."
            ) from refusal


def _launched_processes() -> int:
    """How many processes train together: as launchers say, where they have not met yet."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or 1)
