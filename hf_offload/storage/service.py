"""One storage service a run: what its accounts share, in whichever order they open.

Note: accounts
    Activations, optimizer state and whatever else a run moves are accounts of one :class:`RunStorage`. Each opens tiers of
    its own, with their own threads and counters; what the user limits is shared: RAM, disk space, bytes written. Tiers over
    the same directories share files, too, so that one account uses what another has freed. The storage is found by the model
    (:func:`storage_of`): the optimizer may be made before a session attaches, after it, or without one. Another account is
    one call: ``DiskTier(directories, storage=storage_of(model), account="gradients")``.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hf_offload.errors import TierFullError
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.sizes import format_bytes
from hf_offload.storage.budgets import Budget
from hf_offload.storage.disk_room import DiskRoom
from hf_offload.storage.handling import Handling
from hf_offload.storage.host_memory import default_ram_budget
from hf_offload.storage.tier import Tier, TierStats
from hf_offload.storage.wear import Wear

ACTIVATIONS = "activations"
OPTIMIZER_STATE = "optimizer state"
GRADIENTS = "gradients"
WEIGHTS = "weights"


class RunStorage:
    """Budgets, files and counters of one run.

    Attributes:
        ram: Bytes of RAM, free room in arenas included.
        disk: Bytes of disk space, free room in files included.
        disk_writes: Bytes written to disk since :meth:`begin_run`.
        stops: The run ends when ``disk_writes`` refuses something; otherwise it goes on in memory.
        wear: What is written to each drive.
        accounts: Counters of each account's tiers, by the account's name and the tier's.
        tiers: Counters of each tier over all accounts, by its name.
        members: What uses the storage. Without any, the next run on the same model gets a new one.
        ram_tiers: Those that may hold RAM without using it.
        handling: What all that moves takes of the training's threads.
    """

    def __init__(
        self, ram_bytes: int | None = None, disk_bytes: int | None = None, written_bytes: int | None = None
    ) -> None:
        self.ram = Budget(ram_bytes)
        self.disk = Budget(disk_bytes)
        self.disk_writes = Budget(written_bytes)
        self.stops = False
        self.wear = Wear()
        self.accounts: dict[str, dict[str, TierStats]] = {}
        self.tiers: dict[str, TierStats] = {}
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        self.ram_tiers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.handling = Handling()
        self._freeing: weakref.WeakMethod[Callable[[], None]] | None = None
        self._rooms: weakref.WeakValueDictionary[Any, DiskRoom] = weakref.WeakValueDictionary()
        self._opening = threading.Lock()

    def begin_run(self, config: OffloadConfig, on_host: bool, processes: int) -> None:
        """Set the limits of a run that begins now. What is occupied already counts, what was written before does not.

        ``on_host``, the model is in RAM itself; ``processes`` train on this machine, and ``config`` has this one's part of
        each limit.
        """
        self.ram.limit_bytes = _bytes(config.ram_budget)
        if (
            config.ram_budget is None
            and not on_host
            and {"ram", "auto"} & {config.tier, config.state_place, config.weights_place}
        ):
            self.ram.limit_bytes = default_ram_budget(processes)
        self.disk.limit_bytes = _bytes(config.disk_budget)
        self.disk_writes.restart(_bytes(config.max_disk_write_bytes))
        self.stops = config.on_disk_write_limit == "stop"
        self.wear.begin_run()

    @property
    def must_stop(self) -> bool:
        """Whether something was not written because of the run's limit, and the run is to end then."""
        return self.stops and self.disk_writes.refused

    def open_account(self, name: str, tier: str) -> TierStats:
        """Counters for another tier of the account ``name``."""
        shared = self.tiers.setdefault(tier, TierStats())
        stats = self.accounts.setdefault(name, {})[tier] = TierStats(shared)
        return stats

    def free_with(self, method: Callable[[], None]) -> None:
        """What frees slots that activations no longer need, where that is put off. It is not kept alive."""
        self._freeing = weakref.WeakMethod(method)

    def free_unneeded(self) -> None:
        """Free slots that activations no longer need, so that another account finds room."""
        method = None if self._freeing is None else self._freeing()
        if method is not None:
            method()

    def take_ram(self, nbytes: int) -> bool:
        """Take bytes of the RAM budget, if need be from tiers that hold RAM without using it. ``ram.give`` returns them."""
        if self.ram.take(nbytes):
            return True
        for tier in list(self.ram_tiers):
            tier.drop_idle()
        return self.ram.take(nbytes)

    def join_room(self, tier: Tier, paths: Sequence[Any], chunk_bytes: int) -> tuple[DiskRoom, int]:
        """The room for a ``tier`` over these directories, and its number there.

        Tiers over the same directories share it, as the first of them has opened it.

        Raises :class:`~hf_offload.errors.OffloadConfigError` as :meth:`DiskRoom.open` does.
        """
        with self._opening:
            key = tuple(map(os.path.abspath, paths))
            room = self._rooms.get(key)
            number = None if room is None else room.join()
            if room is None or number is None:
                room = self._rooms[key] = DiskRoom.open(paths, self.disk, tier.call_with_watchdog, chunk_bytes)
                for file in room.files:
                    self.wear.add(file)
                number = room.join()
                assert number is not None  # it has just been opened
            return room, number


def _bytes(value: int | str | None) -> int | None:
    return None if value is None else int(value)


class HeldRam:
    """Bytes of the RAM budget that an account holds in tensors of its own, not in a tier. Dropping it returns them.

    Attributes:
        held: Bytes by name.
    """

    def __init__(self, storage: RunStorage, account: str):
        self.held: dict[str, int] = {}
        self._storage = storage
        self._stats = storage.open_account(account, "ram")
        weakref.finalize(self, _give_held, self.held, storage.ram).atexit = False

    def hold(self, sizes: Mapping[str, int]) -> None:
        """Take bytes for these names, in place of what is held of them.

        Raises ``TierFullError`` if the budget has less left.
        """
        total = sum(sizes.values())
        if not self._storage.take_ram(total):
            budget = self._storage.ram
            raise TierFullError(
                f"No room for {format_bytes(total)} in RAM: {format_bytes(budget.taken_bytes)} of "
                f"ram_budget={format_bytes(budget.limit_bytes or 0)} are taken."
            )
        self._stats.reserve(total)
        self.release(sizes)
        self.held |= sizes

    def release(self, names: Iterable[str]) -> None:
        """Return the bytes of these names."""
        total = sum(self.held.pop(name, 0) for name in list(names))
        self._storage.ram.give(total)
        self._stats.release(total)


def _give_held(held: dict[str, int], ram: Budget) -> None:
    ram.give(sum(held.values()))


_storages: "weakref.WeakKeyDictionary[Any, RunStorage]" = weakref.WeakKeyDictionary()


def storage_of(model: Any) -> RunStorage:
    """The storage of the run that trains ``model``, or a new one if none is in use. The caller joins its ``members``."""
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        model = inner  # in a wrapper of torch.compile, or of DistributedDataParallel
    storage = _storages.get(model)
    if storage is None or not storage.members:
        storage = _storages[model] = RunStorage()
    return storage


def share_storage(model: Any, storage: RunStorage) -> None:
    """Let ``storage`` be that of the run that trains ``model``: weights are there already."""
    _storages[model] = storage
