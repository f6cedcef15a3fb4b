"""Memory of what a store has written: it has gone when those go on that waited for it, however late other threads are."""

import threading
import weakref

import pytest
import torch

from hf_offload.storage import stored as stored_module
from hf_offload.storage.ram import RamTier
from hf_offload.storage.service import RunStorage
from hf_offload.storage.stored import Store, Stored

_NBYTES = 1 << 20
_TIMEOUT_S = 30


@pytest.fixture
def store():
    storage = RunStorage()
    tier = RamTier(storage=storage)
    yield Store(storage, tier, "state", _NBYTES)
    tier.close()


@pytest.fixture
def go():
    """Lets threads go on that were held up."""
    event = threading.Event()
    yield event
    event.set()


def _send(store: Store) -> "tuple[Stored, weakref.ref[torch.UntypedStorage]]":
    buffer = torch.full((_NBYTES,), 7, dtype=torch.uint8)
    memory = weakref.ref(buffer.untyped_storage())
    stored = Stored(store, buffer)
    del buffer
    stored.send()
    return stored, memory


@pytest.mark.parametrize("wait", [Store.throttle, Store.settle])
@pytest.mark.parametrize("is_done", [False, True])
def test_memory_has_gone_before_the_callback_of_its_write_runs(store, go, monkeypatch, wait, is_done):
    let_go = stored_module._Written.__call__

    def late(self, future):
        go.wait(_TIMEOUT_S)
        let_go(self, future)

    monkeypatch.setattr(stored_module._Written, "__call__", late)
    stored, memory = _send(store)
    if is_done:
        store.tier.wait_until_done(stored._write)
    wait(store)
    assert memory() is None
    go.set()
    assert torch.equal(stored.take(last=True), torch.full((_NBYTES,), 7, dtype=torch.uint8))


def test_memory_has_gone_once_another_thread_says_so(store, go):
    let_go = threading.Event()

    class Lock:
        """One that holds threads up which have let go of it, but for the one that it was made in."""

        def __init__(self):
            self._lock, self._thread = threading.Lock(), threading.get_ident()

        def __enter__(self):
            self._lock.acquire()

        def __exit__(self, *_):
            self._lock.release()
            if threading.get_ident() != self._thread:
                let_go.set()
                go.wait(_TIMEOUT_S)

    store.lock = Lock()
    _stored, memory = _send(store)
    assert let_go.wait(_TIMEOUT_S)
    store.throttle()
    assert memory() is None
