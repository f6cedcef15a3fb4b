"""State of blocks that wait, in files: written when a turn ends, read when the block trains again, or is saved."""

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_offload.errors import StorageError, TierFullError, WriteLimitError
from hf_offload.interrupts import signals_deferred
from hf_offload.optimizers.blockwise.schedule import BlockwiseConfig
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.buffers import PAGE, empty_at_phase
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.service import OPTIMIZER_STATE, HeldRam, RunStorage
from hf_offload.storage.tier import Slot
from hf_offload.tensors import has_bytes, is_ordinary

logger = logging.getLogger(__name__)

_ALIGN_BYTES = 64
"""Of vector instructions, and of the widest number there is."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """State of one parameter, and the slot where its tensors are."""

    slot: Slot
    packing: "_Packing"


class ParkedState:
    """State of parameters by their names, between two of their turns: the account "optimizer state" of a run's storage.

    On disk it lies in files without a name, whose room is free once this object is dropped. All of a parameter's tensors are
    one buffer of whole blocks, so that the tier keeps no ends of it in memory. Every call waits for its bytes, and needs
    memory for one parameter's state in addition to its result. Bytes that come back are compared with a checksum.

    State in RAM stays where it is: only its bytes are taken of the run's RAM budget. Once the run's limit of bytes written is
    met, what would go to disk stays in RAM.

    With ``inactive_state="drop"`` nothing is parked.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a directory that cannot be used, or a budget that the run does
    not have.
    """

    def __init__(self, storage: RunStorage, config: BlockwiseConfig):
        self._storage = storage
        self._keeps = config.inactive_state != "drop"
        storage.members.add(self)
        self._tier: DiskTier | None = None
        self._entries: dict[str, _Entry] = {}
        self._ram = HeldRam(storage, OPTIMIZER_STATE)
        self._warned = False
        if config.inactive_state == "ssd":
            self._tier = DiskTier(
                config.directories or [Path(tempfile.gettempdir())],
                storage=storage,
                account=OPTIMIZER_STATE,
                budget_bytes=None if config.disk_budget is None else int(config.disk_budget),
                checksum=True,
            )
            if not config.directories:
                logger.warning("No directory was named for optimizer state: it goes to %s.", self._tier.where)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def nbytes(self, name: str) -> int:
        """Bytes of the tensors of ``name`` that are on disk; 0 if there are none."""
        return self._entries[name].packing.tensor_bytes if name in self._entries else 0

    @signals_deferred
    def add(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Write ``states``, all of them or none; those that are not ``in`` this object then are to stay in RAM.

        Raises :class:`~hf_offload.errors.StorageError` if neither disk nor RAM has room: what was parked before still is.
        """
        if not self._keeps:
            return
        self._storage.free_unneeded()
        written: dict[str, _Entry] = {}
        if self._tier is not None:
            try:
                for name, state in states.items():
                    written[name] = self._write(self._tier, name, state)
            except WriteLimitError as error:
                self._free(written.values())
                written = {}
                self._warn(error)
            except BaseException:
                self._free(written.values())
                raise
        if not written:
            self._keep_in_ram(states)
        self._free([self._entries.pop(name) for name in states if name in self._entries])
        self._entries |= written
        self._ram.release(written)
        self._storage.wear.keep()

    @signals_deferred
    def replace(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Park ``states`` and nothing else. Raises as :meth:`add` does, and then nothing has changed."""
        before = [name for name in (*self._entries, *self._ram.held) if name not in states]
        self.add(states)
        self.remove(before)

    @signals_deferred
    def read(self, name: str) -> dict[str, Any]:
        """A copy of the state of ``name``, in memory of the CPU.

        Raises :class:`~hf_offload.errors.StorageError` if it cannot be read.
        """
        entry, tier = self._entries[name], self._tier
        assert tier is not None  # or nothing would have been written
        buffer = empty_at_phase(entry.slot.nbytes, tier.phase(entry.slot))
        try:
            _wait(tier, tier.read(entry.slot, buffer))
        except StorageError as error:
            raise StorageError(
                f"Optimizer state of {name} cannot be read back from disk. No weight was changed by this step: go on from "
                f"the last checkpoint, with inactive_state='ram' or another directory. {error}"
            ) from error
        return entry.packing.copies(buffer)

    def remove(self, names: Iterable[str]) -> None:
        """Forget what is parked of ``names``."""
        names = list(names)
        self._free([self._entries.pop(name) for name in names if name in self._entries])
        self._ram.release(names)

    def _write(self, tier: DiskTier, name: str, state: dict[str, Any]) -> _Entry:
        packing = _Packing(state)
        used = packing.nbytes
        granule = max(PAGE, tier.block_bytes)
        nbytes = -(-used // granule) * granule
        try:
            slot = tier.reserve(nbytes)
            try:
                buffer = empty_at_phase(nbytes, 0)
                packing.fill(buffer, state)
                buffer[used:] = 0
                _wait(tier, tier.write(slot, buffer))
            except BaseException:
                tier.free(slot)
                raise
        except WriteLimitError:
            raise
        except (StorageError, TierFullError) as error:
            raise StorageError(
                f"Optimizer state of {name} ({format_bytes(used)}) cannot go to disk. It is still in memory, and the weights "
                f"are those of the last step, so a checkpoint can be saved: go on with inactive_state='ram', with "
                f"more room, or with another directory. {error}"
            ) from error
        return _Entry(slot, packing)

    def _free(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            assert self._tier is not None  # or nothing would have been written
            self._tier.free(entry.slot)

    def _keep_in_ram(self, states: Mapping[str, dict[str, Any]]) -> None:
        try:
            self._ram.hold({name: _Packing(state).tensor_bytes for name, state in states.items()})
        except TierFullError as error:
            if not self._storage.must_stop:  # it has to stay there for the checkpoint that is saved now
                raise StorageError(
                    f"Optimizer state of {', '.join(states)} cannot wait in RAM. It is still there, and the weights are "
                    "those of the last step, so a checkpoint can be saved: go on with a larger ram_budget, with "
                    "inactive_state='ssd' and a max_disk_write_bytes that is not spent, or with inactive_state='drop'. "
                    f"{error}"
                ) from error

    def _warn(self, error: WriteLimitError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("Optimizer state stays in RAM from now on: %s", error)


def _wait(tier: DiskTier, future: "Future[None]") -> None:
    tier.wait_until_done(future)
    future.result()


# -- many tensors in one buffer ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Place:
    """A tensor in the buffer: ``like`` has its shape, strides and dtype, and no bytes."""

    offset: int
    like: Tensor


@dataclasses.dataclass(frozen=True)
class _Wrapped:
    """A tensor made of others, such as a quantised one."""

    rebuild: Callable[[dict[str, Any]], Tensor]
    inside: dict[str, Any]


class _Packing:
    """Where the tensors of a state lie in one buffer, so that they move as one. What is not a plain tensor is kept here.

    Attributes:
        nbytes: Bytes of the buffer.
        tensor_bytes: Bytes of the tensors in it.
    """

    def __init__(self, state: Mapping[str, Any]):
        self.nbytes = self.tensor_bytes = 0
        self._entries = {key: self._plan(value) for key, value in state.items()}

    def fill(self, buffer: Tensor, state: Mapping[str, Any]) -> None:
        """Copy the tensors of ``state``, which has the form of the one that was planned for, to ``buffer``."""
        for key, entry in self._entries.items():
            _copy(entry, state[key], buffer)

    def copies(self, buffer: Tensor) -> dict[str, Any]:
        """The state, whose tensors are copies of what is in ``buffer``, with storages of their own."""
        return {key: _copied(entry, buffer) for key, entry in self._entries.items()}

    def _plan(self, value: Any) -> Any:
        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            kind, size, stride = type(value), value.shape, value.stride()
            return _Wrapped(
                lambda inside: kind.__tensor_unflatten__(inside, context, size, stride),
                {name: self._plan(getattr(value, name)) for name in names},
            )
        if not (isinstance(value, Tensor) and is_ordinary(type(value)) and has_bytes(value)):
            return value
        offset = -(-self.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.nbytes = offset + value.nbytes
        self.tensor_bytes += value.nbytes
        return _Place(offset, torch.empty_like(value, device="meta", requires_grad=False))


def _part(place: _Place, buffer: Tensor) -> Tensor:
    # In the order of memory, which is not that of the shape where strides say so.
    flat = buffer[place.offset : place.offset + place.like.nbytes].view(place.like.dtype)
    return flat.as_strided(place.like.shape, place.like.stride(), flat.storage_offset())


def _copy(entry: Any, value: Any, buffer: Tensor) -> None:
    if isinstance(entry, _Place):
        _part(entry, buffer).copy_(value.detach())
    elif isinstance(entry, _Wrapped):
        for name, inside in entry.inside.items():
            _copy(inside, getattr(value, name), buffer)


def _copied(entry: Any, buffer: Tensor) -> Any:
    if isinstance(entry, _Place):
        return _part(entry, buffer).clone()
    if isinstance(entry, _Wrapped):
        return entry.rebuild({name: _copied(inside, buffer) for name, inside in entry.inside.items()})
    return entry
