"""State of blocks that wait, in files: written when a turn ends, read when the block trains again, or is saved."""

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_offload.errors import StorageError, TierFullError
from hf_offload.interrupts import signals_deferred
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.buffers import PAGE, empty_at_phase
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.tier import Slot
from hf_offload.storage.wear import Wear

logger = logging.getLogger(__name__)

_ALIGN_BYTES = 16  # of the widest number there is, complex128


@dataclasses.dataclass(frozen=True)
class _Place:
    """A tensor that went: ``like`` has its shape, strides and dtype, and no bytes."""

    offset: int
    like: Tensor


@dataclasses.dataclass(frozen=True)
class _Wrapped:
    """A tensor made of others, such as a part of one that is sharded."""

    rebuild: Callable[[dict[str, Any]], Tensor]
    inside: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Entry:
    """State of one parameter, with places where tensors were. ``nbytes`` are those of the tensors."""

    slot: Slot
    state: dict[str, Any]
    nbytes: int


class ParkedOnDisk:
    """State of parameters by their names, in private files without a name, which go when this object does.

    All of a parameter's tensors are one buffer of whole blocks, so that the tier keeps no ends of it in memory. Every call
    waits for its bytes; what a call needs of memory beside its result is one parameter's state. Bytes that come back are
    compared with a checksum of those that went.

    Args:
        directories: Where the files are; the system's temporary folder if there are none.
        budget_bytes: Most bytes of disk they occupy. Default: as much as the disk has.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a directory that cannot be used.
    """

    def __init__(self, directories: Iterable[Path], budget_bytes: int | None):
        chosen = list(directories) or [Path(tempfile.gettempdir())]
        self._tier = DiskTier(chosen, budget_bytes=budget_bytes, checksum=True)
        if chosen != list(directories):
            logger.warning("No directory was named for optimizer state: it goes to %s.", chosen[0])
        self._wear = Wear(self._tier.files)
        self._granule = max(PAGE, self._tier.block_bytes)
        self._entries: dict[str, _Entry] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def nbytes(self, name: str) -> int:
        """Bytes of the tensors of ``name``; 0 if nothing is parked."""
        return self._entries[name].nbytes if name in self._entries else 0

    def add(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Write ``states``, all of them or none.

        Raises :class:`~hf_offload.errors.StorageError` if they cannot be written: what was parked before still is.
        """
        written: dict[str, _Entry] = {}
        with signals_deferred:
            try:
                for name, state in states.items():
                    written[name] = self._write(name, state)
            except BaseException:
                self._free(written.values())
                raise
            self.remove(written)
            self._entries |= written
            self._wear.keep()

    def replace(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Park ``states`` and nothing else. Raises as :meth:`add` does, and then nothing has changed."""
        before = [name for name in self._entries if name not in states]
        with signals_deferred:
            self.add(states)
            self.remove(before)

    def read(self, name: str) -> dict[str, Any]:
        """A copy of the state of ``name``, in memory of the CPU.

        Raises :class:`~hf_offload.errors.StorageError` if it cannot be read.
        """
        entry = self._entries[name]
        buffer = empty_at_phase(entry.slot.nbytes, self._tier.phase(entry.slot))
        try:
            self._wait(self._tier.read(entry.slot, buffer))
        except StorageError as error:
            raise StorageError(
                f"Optimizer state of {name} cannot be read back from disk. No weight was changed by this step: go on from "
                f"the last checkpoint, with inactive_state='ram' or another directory. {error}"
            ) from error
        return {key: _filled(value, buffer) for key, value in entry.state.items()}

    def remove(self, names: Iterable[str]) -> None:
        """Forget what is parked of ``names``."""
        self._free([self._entries.pop(name) for name in names if name in self._entries])

    def _write(self, name: str, state: dict[str, Any]) -> _Entry:
        tensors: list[tuple[int, Tensor]] = []
        planned = {key: _planned(value, tensors) for key, value in state.items()}
        used = _end(tensors)
        nbytes = -(-used // self._granule) * self._granule
        try:
            slot = self._tier.reserve(nbytes)
            try:
                buffer = empty_at_phase(nbytes, 0)
                for offset, tensor in tensors:
                    _part(buffer, offset, tensor).copy_(tensor)
                buffer[used:] = 0
                self._wait(self._tier.write(slot, buffer))
            except BaseException:
                self._tier.free(slot)
                raise
        except (StorageError, TierFullError) as error:
            raise StorageError(
                f"Optimizer state of {name} ({format_bytes(used)}) cannot go to disk. It is still in memory, and the weights "
                f"are those of the last step, so a checkpoint can be saved: go on with inactive_state='ram', with "
                f"more room, or with another directory. {error}"
            ) from error
        return _Entry(slot, planned, sum(tensor.nbytes for _, tensor in tensors))

    def _wait(self, future: "Future[None]") -> None:
        self._tier.wait_until_done(future)
        future.result()

    def _free(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            self._tier.free(entry.slot)


def _planned(value: Any, tensors: list[tuple[int, Tensor]]) -> Any:
    """What stands for ``value``; tensors that go are added to ``tensors``, each with its place in the buffer."""
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        kind, size, stride = type(value), value.shape, value.stride()
        return _Wrapped(
            lambda inside: kind.__tensor_unflatten__(inside, context, size, stride),
            {name: _planned(getattr(value, name), tensors) for name in names},
        )
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
        offset = -(-_end(tensors) // _ALIGN_BYTES) * _ALIGN_BYTES
        tensors.append((offset, value.detach()))
        return _Place(offset, torch.empty_like(value, device="meta", requires_grad=False))
    return value.to("cpu") if isinstance(value, Tensor) else value


def _filled(value: Any, buffer: Tensor) -> Any:
    if isinstance(value, _Place):
        return torch.empty_like(value.like, device="cpu").copy_(_part(buffer, value.offset, value.like))
    if isinstance(value, _Wrapped):
        return value.rebuild({name: _filled(inside, buffer) for name, inside in value.inside.items()})
    return value


def _part(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _end(tensors: list[tuple[int, Tensor]]) -> int:
    return max((offset + tensor.nbytes for offset, tensor in tensors), default=0)
