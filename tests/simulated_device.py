"""A device whose streams run late, in any order that events allow: races show without a GPU.

Compute is the test's own eager torch code, so the compute stream is always up to date, and letting it wait for an event
forces what the event stands for. Everything on other streams happens as late as possible, or at random moments chosen by a
seed. A queued copy holds no reference to its ends: memory that is given back before its copy ran counts as reused, as an
allocator would, and reads as poison.
"""

import random
import threading
import weakref

import torch

from hf_offload.engine.device import Device

POISON = 0xA5


class _Stream:
    def __init__(self):
        self.queue = []  # (done-number, function)
        self.queued = 0
        self.done = 0


class _Event:
    def __init__(self, stream, number):
        self.stream = stream
        self.number = number


class SimulatedDevice(Device):
    torch_device = torch.device("cpu")
    is_host = False

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._compute = _Stream()
        self._streams = []
        self.faults = []
        self.copies = 0

    def allocate(self, nbytes, phase):
        self._maybe_run()
        raw = torch.full((nbytes + 512,), POISON, dtype=torch.uint8)
        shift = (phase - raw.data_ptr()) % 512
        return raw[shift : shift + nbytes]

    def current_stream(self):
        return self._compute

    def new_stream(self):
        stream = _Stream()
        self._streams.append(stream)
        return stream

    def record(self, stream):
        with self._lock:
            return _Event(stream, stream.queued)

    def wait(self, stream, event):
        with self._lock:
            if stream is self._compute:
                self._run(event.stream, event.number)
            else:
                self._queue(stream, lambda: self._run(event.stream, event.number))
        self._maybe_run()

    def copy(self, target, source, stream):
        ends = _Place(target), _Place(source)

        def run():
            into, out_of = ends[0].tensor(), ends[1].tensor()
            self.copies += 1
            if into is None:
                self.faults.append("a copy wrote into memory that had been given back")
            elif out_of is None:
                self.faults.append("a copy read memory that had been given back")
                into.fill_(POISON)
            else:
                into.copy_(out_of)

        with self._lock:
            self._queue(stream, run)
        self._maybe_run()

    def synchronize(self, event):
        with self._lock:
            self._run(event.stream, event.number)

    def _queue(self, stream, function):
        stream.queued += 1
        stream.queue.append((stream.queued, function))

    def _run(self, stream, number):
        while stream.queue and stream.queue[0][0] <= number:
            done, function = stream.queue.pop(0)
            function()
            stream.done = done

    def _maybe_run(self):
        with self._lock:
            for stream in self._streams:
                if stream.queue and self._random.random() < 0.2:
                    self._run(stream, stream.done + self._random.randint(1, 3))


class _Place:
    """Where a tensor's bytes are, without keeping them."""

    def __init__(self, tensor):
        self._storage = weakref.ref(tensor.untyped_storage())
        self._offset = tensor.storage_offset()
        self._nbytes = tensor.numel()

    def tensor(self):
        storage = self._storage()
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, self._offset, (self._nbytes,), (1,))
