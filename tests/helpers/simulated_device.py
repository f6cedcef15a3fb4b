"""A device whose streams run late, in any order that events allow: races show without a GPU.

Streams are queues. What is on them (copies, kernels, waits) runs when somebody on the host waits for it, or at moments
that a seed chooses, each stream at a pace of its own: some never run by themselves. Memory comes from a model of the
caching allocator: a block that is given back can be handed out again at once *on the stream it was made on*, and is
overwritten with NaN at that place of the stream, as its next owner might do. Nothing that is queued holds memory alive.
So whoever forgets to wait, waits on the wrong stream, or gives back too early reads NaN, or somebody else's bytes.

Compute is either :meth:`SimulatedDevice.launch`, which is queued like everything else (``late_compute``), or the test's
own eager torch code: then the compute stream is always up to date, and letting it wait for an event forces what the event
stands for.
"""

import collections
import queue
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager

import torch

from hf_offload.engine.device import Device

POISON = 0xFF  # a NaN as a float of any size
_PAGE = 512
_PACES = (0.0, 0.1, 0.5, 0.9)


class _Stream:
    def __init__(self, pace: float):
        self.queue: collections.deque = collections.deque()  # functions to call, and events to wait for
        self.queued = 0
        self.done = 0
        self.pace = pace


class _Event:
    def __init__(self, stream: _Stream, number: int):
        self.stream = stream
        self.number = number

    @property
    def happened(self) -> bool:
        return self.stream.done >= self.number


class _Block:
    """A piece of device memory; ``life`` counts its owners, in the order of the stream it was made on."""

    def __init__(self, start: int, nbytes: int, owner: _Stream):
        self.start = start
        self.nbytes = nbytes
        self.owner = owner
        self.users: set[_Stream] = set()
        self.life = 0  # of whoever has it, as the host sees it
        self.lives_begun = 0  # as the stream sees it
        self.alive: weakref.ref | None = None


def _in_engine_thread() -> bool:
    return threading.current_thread().name.startswith("hf_offload-")


class SimulatedDevice(Device):
    """``streams`` compute streams, of which the test makes one current; all that is random comes from ``seed``."""

    torch_device = torch.device("cpu")
    is_host = False

    def __init__(
        self,
        seed: int,
        *,
        late_compute: bool = False,
        streams: int = 1,
        paces: tuple[float, ...] = _PACES,
        arena_bytes: int = 4 << 20,
        in_worker: Callable[[], bool] = _in_engine_thread,
    ):
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._late_compute = late_compute
        self._paces = paces
        self._streams: list[_Stream] = []
        self.compute_streams = [self.new_stream() for _ in range(streams)]
        self._current = self.compute_streams[0]
        self._in_worker = in_worker
        self._arena = torch.full((arena_bytes + _PAGE,), POISON, dtype=torch.uint8)
        self._base = self._arena.data_ptr() + -self._arena.data_ptr() % _PAGE
        self._pages: list[_Block] = []
        self._free: dict[tuple[_Stream, int], list[_Block]] = collections.defaultdict(list)
        self._limbo: list[tuple[_Block, list[_Event]]] = []  # given back while other streams may still use them
        self._given_back: queue.SimpleQueue[_Block] = queue.SimpleQueue()
        self.every_turn: Callable[[], None] = lambda: None  # what else goes on meanwhile
        self.faults: list[str] = []
        self.copies = 0
        self.trace: list[str] | None = None

    # -- what the engine asks ---------------------------------------------------------------------------------------------

    def make_current(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def allocate(self, nbytes, phase):
        self._turn()
        with self._lock:
            shift = phase % _PAGE
            block = self._take(-(-(nbytes + shift) // _PAGE) * _PAGE, self.current_stream())
            begin = self._base - self._arena.data_ptr() + block.start
            raw = torch.from_numpy(self._arena.numpy()[begin : begin + block.nbytes])
            block.alive = weakref.ref(raw.untyped_storage(), lambda _: self._given_back.put(block))
            return raw[shift : shift + nbytes]

    def current_stream(self):
        if self._in_worker():
            self.faults.append("a worker asked for the current stream, which belongs to another thread")
        return self._current

    def new_stream(self):
        stream = _Stream(self._random.choice(self._paces))
        self._streams.append(stream)
        return stream

    def record(self, stream, timed=False):
        self._turn()
        with self._lock:
            return _Event(stream, stream.queued)

    def seconds_between(self, first, second):
        assert first.happened
        assert second.happened
        return 1.0

    def wait(self, stream, event):
        with self._lock:
            if stream in self.compute_streams and not self._late_compute:
                self._force(event)
            else:
                self._queue(stream, event)
        self._turn()

    def copy(self, target, source, stream):
        self._turn()
        with self._lock:
            into, out_of = self._place(target), self._place(source)

            def run():
                self.copies += 1
                data = out_of.memory(self.faults, "a copy read")
                memory = into.memory(self.faults, "a copy wrote into")
                if memory is not None:
                    memory.fill_(POISON) if data is None else memory.copy_(data)

            self._queue(stream, run)
        self._turn()

    def use(self, tensor, stream):
        with self._lock:
            block = self._block(tensor)
            if block is not None and block.owner is not stream:
                block.users.add(stream)

    def has_happened(self, event):
        self._turn()
        with self._lock:
            return event.happened

    def synchronize(self, event):
        self._turn()
        with self._lock:
            self._force(event)

    # -- what the test's own compute asks -----------------------------------------------------------------------------------

    @contextmanager
    def on(self, stream):
        """Compute on ``stream``."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def launch(self, kernel, size, *inputs):
        """A new float32 tensor that ``kernel(output, *inputs)`` fills, late, in the order of the current stream."""
        size = torch.Size(size)
        memory = self.allocate(4 * size.numel(), 0).untyped_storage()
        output = torch.empty(0).set_(memory, 0, size)  # a tensor of its own, no view
        self.write(kernel, output, *inputs)
        return output

    def write(self, kernel, *tensors):
        """``kernel(*tensors)``, late, in the order of the current stream, into memory that is there already."""
        with self._lock:
            places = [self._place(tensor) for tensor in tensors]

            def run():
                kernel(*(place.memory(self.faults, "compute used") for place in places))

            self._queue(self._current, run)
        self._turn()

    def receive(self, tensor):
        """What whoever uses another stream's tensor has to do: wait for it, and tell the allocator."""
        block, stream = self._block(tensor), self._current
        if block is not None and block.owner is not stream:
            self.wait(stream, self.record(block.owner))
            self.use(tensor, stream)

    def finish(self):
        """Let the host wait for everything that computes."""
        for stream in self.compute_streams:
            self.synchronize(self.record(stream))

    # -- time ---------------------------------------------------------------------------------------------------------------

    def _queue(self, stream, what):
        stream.queued += 1
        stream.queue.append(what)

    def _step(self, stream):
        what = stream.queue[0]
        if isinstance(what, _Event):
            if not what.happened:
                return False
        else:
            what()
        stream.queue.popleft()
        stream.done += 1
        if self.trace is not None:
            self.trace.append(f"stream {self._streams.index(stream)}: {stream.done}")
        return True

    def _force(self, event):
        goals = [event]
        while goals:
            stream = goals[-1].stream
            if goals[-1].happened:
                goals.pop()
            elif not self._step(stream):
                goals.append(stream.queue[0])

    def _turn(self):
        """Some time goes by."""
        self.every_turn()
        with self._lock:
            self._clean_up()
            for stream in self._streams:
                while stream.queue and self._random.random() < stream.pace and self._step(stream):
                    pass

    # -- memory -------------------------------------------------------------------------------------------------------------

    def _take(self, nbytes, stream):
        free = self._free[stream, nbytes]
        if free:
            block = free.pop()
        else:
            start = len(self._pages) * _PAGE
            block = _Block(start, nbytes, stream)
            if start + nbytes > self._arena.numel() - _PAGE:
                raise torch.OutOfMemoryError("the simulated device has no memory left")
            self._pages += [block] * (nbytes // _PAGE)
        return block

    def _clean_up(self):
        while not self._given_back.empty():
            block = self._given_back.get()
            users, block.users = block.users, set()
            self._limbo.append((block, [_Event(user, user.queued) for user in users]))
        for block, events in self._limbo:
            if all(event.happened for event in events):
                block.life += 1
                self._queue(block.owner, lambda block=block: self._poison(block))
                self._free[block.owner, block.nbytes].append(block)
        self._limbo = [(block, events) for block, events in self._limbo if not all(event.happened for event in events)]
        if not self._late_compute:
            for stream in self.compute_streams:
                self._force(_Event(stream, stream.queued))

    def _poison(self, block):
        begin = self._base - self._arena.data_ptr() + block.start
        self._arena[begin : begin + block.nbytes].fill_(POISON)
        block.lives_begun += 1

    def _block(self, tensor):
        page, _ = divmod(tensor.data_ptr() - self._base, _PAGE)
        return self._pages[page] if 0 <= page < len(self._pages) else None

    def _place(self, tensor):
        block = self._block(tensor)
        if block is None:
            return _HostPlace(tensor)
        data = torch.empty(0, dtype=tensor.dtype)
        offset = (tensor.data_ptr() - self._arena.data_ptr()) // tensor.element_size()
        return _DevicePlace(data.set_(self._arena.untyped_storage(), offset, tensor.size(), tensor.stride()), block)


class _DevicePlace:
    """Where a tensor's bytes are, without keeping them."""

    def __init__(self, data, block):
        self._data = data
        self._block = block
        self._life = block.life

    def memory(self, faults, who):
        if self._life != self._block.lives_begun:
            when = "had been given back" if self._life < self._block.lives_begun else "was not given back yet"
            faults.append(f"{who} memory that {when}")
        return self._data


class _HostPlace:
    """The same for memory of the host, which goes at once when it is given back."""

    def __init__(self, tensor):
        self._storage = weakref.ref(tensor.untyped_storage())
        self._layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._dtype = tensor.dtype

    def memory(self, faults, who):
        storage = self._storage()
        if storage is None:
            faults.append(f"{who} memory that had been given back")
            return None
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)
