"""Records and handles: ownership and state of the bytes of saved tensors.

Note: lifetimes
    autograd -> handle (:class:`PackedView`, :class:`KeptTensor`) -> :class:`Record` -> bytes.
    Autograd lets go of a handle when the graph does; the last handle takes its record along, and the record's
    :class:`Cleanup` is put on a queue. Nothing else ends a life: not the number of unpacks, not the end of a step. So
    retain_graph, exceptions, tensors that are never unpacked and several forwards before a backward need no special case.
    A handle never holds the tensor that pack received: that tensor holds its graph, the graph holds the handle, and the
    cycle runs through C++, where Python's collector cannot see it.
    The end of a record is noticed by the callback of a weak reference, not by ``__del__``: while that runs, other threads'
    weak references still find the object, and would bring it back to life with its slot already given away. The callback is
    a function of C: in one of Python, Ctrl-C could be raised, and would be discarded along with the rest of the callback.
"""

import collections
import enum
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from hf_offload.storage.tier import Slot


class State(enum.Enum):
    """Where the bytes of a record are. ``buffer`` is the record's own hold on memory."""

    RESIDENT = "resident"  # buffer held, nothing in the tier. -> STORING; also where a refused or cancelled store ends
    STORING = "storing"  # bytes on their way to the tier. -> STORED, or -> RESIDENT (cancelled, refused, failed)
    STORED = "stored"  # bytes in the tier; the buffer is gone or about to go. -> LOADING
    LOADING = "loading"  # buffer allocated, bytes on their way into it. -> LOADED, or -> STORED (failed)
    LOADED = "loaded"  # bytes in the tier and in buffer. -> STORED (evicted)


class Cleanup(weakref.ref["Record"]):
    """What a record has in the tier and in the counts, to be cleaned up once it is gone.

    It is the weak reference whose callback puts it on the queue.
    """

    __slots__ = ("ahead", "future", "held", "kept", "key", "leaving", "nbytes", "slot")
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __new__(cls, record: "Record", finalized: "queue.SimpleQueue[Cleanup]") -> "Cleanup":
        # May be called inside any allocation, under any lock that this thread holds: it must take none.
        return super().__new__(cls, record, finalized.put)

    def __init__(self, record: "Record", finalized: "queue.SimpleQueue[Cleanup]"):
        super().__init__(record, finalized.put)  # type: ignore[call-arg]  # typeshed knows no __init__ of a reference
        self.key = id(record)
        self.nbytes = record.nbytes
        self.slot: Slot | None = None
        self.future: Future[Any] | None = None
        self.held = False  # the record has a buffer
        self.ahead = False  # in memory early, for backward
        self.leaving = False  # in memory until it is written
        self.kept = False  # in memory because the plan says so, until there is no room for it


class Record:
    """The bytes ``[start, start + nbytes)`` of one storage at one version of one version counter."""

    __slots__ = (
        "__weakref__",
        "buffer",
        "cleanup",
        "forward",
        "nbytes",
        "ordinal",
        "phase",
        "probe",
        "root",
        "settled",
        "start",
        "state",
        "storage_offset",
        "storage_ref",
        "tape",
        "unit",
        "version",
        "wanted",
    )

    def __init__(
        self,
        buffer: torch.Tensor,
        probe: torch.Tensor,
        root: "weakref.ref[torch.Tensor]",
        start: int,
        unit: str,
        finalized: "queue.SimpleQueue[Cleanup]",
    ):
        self.buffer: torch.Tensor | None = buffer
        self.nbytes = buffer.numel()
        self.start = start
        self.phase = buffer.data_ptr()
        self.probe = probe  # no storage of its own, but the version counter of the saved tensor
        self.version: int = probe._version
        self.root = root  # whose counter that is
        self.settled: threading.Event | None = None  # once the end of the last store is seen in the state
        self.state = State.RESIDENT
        self.unit = unit
        self.wanted = False  # backward will need it soon: a store that ends must not drop the buffer
        self.cleanup = Cleanup(self, finalized)
        self.forward = 0  # the engine's count of forwards when it was saved
        self.ordinal = -1
        self.tape: Any = None
        self._point_at(buffer)

    def _point_at(self, buffer: torch.Tensor) -> None:
        # The storage's Python object lives exactly as long as the storage: a weak reference to it is an identity that
        # an address is not, for an address is reused at once.
        self.storage_ref: Callable[[], torch.UntypedStorage | None] = weakref.ref(buffer.untyped_storage())
        self.storage_offset = int(buffer.storage_offset())

    def hold(self, buffer: torch.Tensor) -> None:
        """Let ``buffer`` be the record's bytes in memory from now on."""
        self.buffer = buffer
        self._point_at(buffer)

    def forget_memory(self) -> None:
        """Forget memory that never received the record's bytes, even if it lives on (in an error's frames, for one)."""
        self.storage_ref = _nothing

    def memory(self) -> tuple[torch.UntypedStorage, int] | None:
        """The storage with the bytes and their offset in it, if memory holds them: the record's own, or any other."""
        storage = self.storage_ref()
        return None if storage is None else (storage, self.storage_offset)

    @property
    def slot(self) -> Slot | None:
        """Its room in the tier."""
        return self.cleanup.slot

    @slot.setter
    def slot(self, slot: Slot | None) -> None:
        self.cleanup.slot = slot

    @property
    def future(self) -> "Future[Any] | None":
        """The transfer that is on its way, or was the last."""
        return self.cleanup.future

    @future.setter
    def future(self, future: "Future[Any] | None") -> None:
        self.cleanup.future = future


def _nothing() -> None:
    """A reference to a storage that is gone."""


class PackedView:
    """What autograd holds for an offloaded tensor: a record and how to look at it."""

    __slots__ = ("conj", "dtype", "neg", "offset", "record", "size", "stride")

    def __init__(self, record: Record, tensor: torch.Tensor, offset: int):
        self.record = record
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = offset  # bytes from the start of the record
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()

    def view(self, storage: torch.UntypedStorage, base: int) -> torch.Tensor:
        """The tensor over ``storage``, where the record's bytes begin at byte ``base``: same size, strides and bits.

        It shares the version counter of the saved tensor: a backward that changes it in place is found out the next time.
        """
        data = torch.empty(0, dtype=self.dtype, device=storage.device)
        data.set_(storage, (base + self.offset) // data.element_size(), self.size, self.stride)
        tensor = self.record.probe.detach()
        tensor.data = data
        if self.conj:
            tensor = torch._conj(tensor)
        if self.neg:
            tensor = torch._neg_view(tensor)
        return tensor


# -- records by storage, and in the order of events ----------------------------------------------------------------------


class RecordIndex:
    """Records by the storage whose bytes they have, so that views of one are moved once."""

    def __init__(self) -> None:
        # id of a storage's Python object -> records of that storage. The weak reference tells a reused id.
        self._identities: dict[int, _Identity] = {}
        self._dead_storages: queue.SimpleQueue[_Identity] = queue.SimpleQueue()

    def find(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, begin: int, end: int, forward: int
    ) -> Record | None:
        """The record that has the bytes from ``begin`` to ``end`` of the storage of ``tensor``, saved in this ``forward``."""
        identity = self._identities.get(id(storage))
        if identity is None or identity() is not storage:
            return None
        root, version = root_of(tensor), tensor._version
        for reference in identity.records:
            record = reference()
            if (
                record is not None
                and record.version == version
                and record.root() is root
                and record.start <= begin
                and end <= record.start + record.nbytes
                # NumPy and other processes write to what needs no gradient without a new version.
                and (record.forward == forward or tensor.requires_grad)
            ):
                return record
        return None

    def add(self, storage: torch.UntypedStorage, record: Record) -> None:
        """``record`` has bytes of this storage. Called under a lock."""
        while not self._dead_storages.empty():
            dead = self._dead_storages.get()
            if self._identities.get(dead.key) is dead:
                del self._identities[dead.key]
        key = id(storage)
        identity = self._identities.get(key)
        if identity is None or identity() is not storage:
            self._identities[key] = identity = _Identity(storage, self._dead_storages.put)
            identity.key = key
            identity.records = [weakref.ref(record)]
        else:
            identity.records = [other for other in identity.records if other() is not None]
            identity.records.append(weakref.ref(record))


class _Identity(weakref.ref[torch.UntypedStorage]):
    """A storage, and the records of it. Its callback, a function of C, puts it on a queue."""

    __slots__ = ("key", "records")
    key: int
    records: list[weakref.ref[Record]]


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose version counter ``tensor`` shares.

    A storage can have several: the parts that ``unsafe_chunk`` gives (LSTM and GRU cells use it) count for themselves, and
    the same number then means different bytes.
    """
    base = tensor._base
    return tensor if base is None else base


class WritesInFlight:
    """Writes that have begun and not ended, in their order; ``nbytes`` is how much they write. Changed under ``lock``."""

    def __init__(self, lock: "threading.RLock"):
        self.nbytes = 0
        self._lock = lock
        self._ends: collections.deque[threading.Event] = collections.deque()

    def begin(self, end: threading.Event, nbytes: int) -> None:
        """Another one."""
        self.nbytes += nbytes
        self._forget_ended()
        self._ends.append(end)

    def oldest(self) -> threading.Event | None:
        """The end of the oldest of them."""
        with self._lock:
            self._forget_ended()
            return self._ends[0] if self._ends else None

    def _forget_ended(self) -> None:
        while self._ends and self._ends[0].is_set():
            self._ends.popleft()


class ConsumedCopies:
    """Records whose bytes are in memory although backward has used them and the graph still holds them, oldest first: under
    retain_graph and double backward every access unpacks again, so they would pile up.
    """

    def __init__(self) -> None:
        self._references: collections.OrderedDict[int, weakref.ref[Record]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._references)

    def add(self, record: Record) -> None:
        """Backward has used ``record``."""
        known = self._references.get(id(record))
        if known is None or known() is not record:  # an id is used again
            self._references[id(record)] = weakref.ref(record)

    def forget(self, key: int) -> None:
        """The record with that id is gone."""
        known = self._references.get(key)
        if known is not None and known() is None:  # else the id is used again already
            del self._references[key]

    def beyond(self, limit_bytes: int) -> list[Record]:
        """Take out the oldest, until the others have at most ``limit_bytes``."""
        held = []
        for key, reference in list(self._references.items()):
            record = reference()
            if record is None or record.buffer is None or id(record) != key:
                del self._references[key]
            elif record.state in (State.LOADED, State.STORED):
                held.append(record)
        excess = sum(record.nbytes for record in held) - limit_bytes
        taken: list[Record] = []
        for record in held:
            if excess <= 0:
                break
            excess -= record.nbytes
            del self._references[id(record)]
            taken.append(record)
        return taken
