"""The conformance suite: what tier.py promises, asked of every tier."""

import contextlib
import gc
import itertools
import threading
import weakref
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
import torch

from hf_offload.errors import StorageError, TierFullError
from hf_offload.storage import disk_room
from hf_offload.storage.buffers import PAGE, empty_at_phase
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.ram import RamTier
from hf_offload.storage.spill import SpillTier
from hf_offload.storage.tier import Slot, Tier

MIB = 1 << 20
TIMEOUT_S = 60
SIZES = ((0, 1, 511, 512, 513, 4095, 4096, 4097), (MIB + 7,), (20 * MIB + 13,))
PHASES = (0, 1, 64, 448, 4032)


def filled(nbytes: int, phase: int = 0, seed: int = 0) -> torch.Tensor:
    buffer = empty_at_phase(nbytes, phase)
    return buffer.random_(0, 256, generator=torch.Generator().manual_seed(seed)) if nbytes else buffer


def store(tier: Tier, buffer: torch.Tensor) -> Slot:
    slot = tier.reserve(buffer.numel())
    tier.write(slot, buffer).result(TIMEOUT_S)
    return slot


def load(tier: Tier, slot: Slot, phase: int | None = None, urgent: bool = False) -> torch.Tensor:
    into = empty_at_phase(slot.nbytes, tier.phase(slot) if phase is None else phase).zero_()
    tier.read(slot, into, urgent).result(TIMEOUT_S)
    return into


def parts(tier: Tier) -> list[Tier]:
    return [tier.first, tier.then] if isinstance(tier, SpillTier) else [tier]


class Stopped:
    """Holds every worker of a tier before it moves its first byte, so that a test decides what is in flight."""

    def __init__(self, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.entered = threading.Semaphore(0)
        self.order: list[object] = []
        for part in parts(tier):
            monkeypatch.setattr(part, "_work", self._wrap(part._work))

    def _wrap(self, work):
        def wrapped(transfer, part):
            self.order.append(transfer.slot)
            self.entered.release()
            assert self.go.wait(TIMEOUT_S)
            work(transfer, part)

        return wrapped


@pytest.fixture
def stopped(tier: Tier, monkeypatch: pytest.MonkeyPatch):
    gate = Stopped(tier, monkeypatch)
    yield gate
    gate.go.set()


def write_and_read(tier: Tier, slot: Slot, phase: int, seed: int) -> None:
    nbytes = slot.nbytes
    buffer = filled(nbytes, phase, seed)
    tier.write(slot, buffer).result(TIMEOUT_S)
    targets = {tier.phase(slot), *PHASES} if nbytes < 20 * MIB else {tier.phase(slot), 64}
    for target in targets:
        # Guard bytes around the target: nothing outside it may be touched.
        room = empty_at_phase(nbytes + 2 * PAGE, target).fill_(171)
        tier.read(slot, room[PAGE : PAGE + nbytes]).result(TIMEOUT_S)
        assert torch.equal(room[PAGE : PAGE + nbytes], buffer)
        assert (room[:PAGE] == 171).all()
        assert (room[PAGE + nbytes :] == 171).all()


@pytest.mark.parametrize("sizes", SIZES)
def test_bytes_come_back_whatever_the_addresses(tier: Tier, sizes: tuple[int, ...]) -> None:
    for nbytes in sizes:
        slot = tier.reserve(nbytes)
        for seed, phase in enumerate(PHASES):
            write_and_read(tier, slot, phase, seed)
        tier.free(slot)


def test_neighbours_are_left_alone(tier: Tier) -> None:
    buffers = [filled(size, phase, size) for size, phase in itertools.product((1, 4097, 300_000, 5 * MIB), (0, 448))]
    slots = [store(tier, buffer) for buffer in buffers]
    tier.write(slots[3], filled(buffers[3].numel(), 64, 99)).result(TIMEOUT_S)
    for index, (slot, buffer) in enumerate(zip(slots, buffers, strict=True)):
        assert torch.equal(load(tier, slot), buffer) == (index != 3)


def test_a_slot_is_read_twice_and_urgently(tier: Tier) -> None:
    buffer = filled(MIB + 7, 64)
    slot = store(tier, buffer)
    for urgent in (False, True, True):
        assert torch.equal(load(tier, slot, urgent=urgent), buffer)


def test_many_threads_store_load_and_free(tier: Tier) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for round_ in range(6):
                buffer = filled(100_000 + 4099 * seed + round_, 64 * seed, seed * 100 + round_)
                slot = store(tier, buffer)
                assert torch.equal(load(tier, slot, urgent=bool(round_ % 2)), buffer)
                tier.free(slot)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not failures
    assert tier.stats.used_bytes == 0


def test_room_is_used_again_and_nothing_grows(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_room, "_GROW_BYTES", 4096)  # files grow by what is needed, so that growth shows
    sizes = [300_000, 5 * MIB + 13, 4096, 300_000, 2 * MIB]

    def occupied() -> int:
        return sum(part.occupied_bytes for part in parts(tier))

    def step(order: int) -> None:
        slots = [store(tier, filled(size, 64)) for size in sizes]
        assert tier.stats.used_bytes >= sum(sizes)
        for slot in slots[::order]:
            tier.free(slot)
        assert tier.stats.used_bytes == 0

    for _ in range(3):
        step(1)  # of several files, each in turn is where the small slots begin
    after_all_turns = occupied()
    for round_ in range(20):
        step(1 if round_ % 2 else -1)
    assert occupied() == after_all_turns
    assert tier.stats.peak_used_bytes < 2 * sum(sizes)


def test_counters_count(tier: Tier) -> None:
    slot = store(tier, filled(2 * MIB))
    load(tier, slot)
    load(tier, slot)
    stats = tier.stats
    assert (stats.written_bytes, stats.read_bytes) == (2 * MIB, 4 * MIB)
    assert stats.write_busy_s > 0
    assert stats.read_busy_s > 0


def test_room_of_a_freed_slot_returns_when_its_transfer_ends(tier: Tier, stopped: Stopped) -> None:
    slot = tier.reserve(MIB)
    future = tier.write(slot, filled(MIB))
    assert stopped.entered.acquire(timeout=TIMEOUT_S)
    tier.free(slot)
    tier.free(slot)
    assert tier.stats.used_bytes == MIB
    stopped.go.set()
    future.result(TIMEOUT_S)
    assert tier.stats.used_bytes == 0


def test_cancel_before_the_first_byte(tier: Tier, stopped: Stopped) -> None:
    slots = [tier.reserve(MIB) for _ in range(12)]
    futures = [tier.write(slot, filled(MIB)) for slot in slots]
    assert stopped.entered.acquire(timeout=TIMEOUT_S)
    assert not futures[0].cancel(), "the first transfer runs and cannot be cancelled"
    assert futures[-1].cancel()
    tier.free(slots[-1])
    assert tier.stats.used_bytes == 11 * MIB
    again = tier.reserve(MIB)
    stopped.go.set()
    wait(futures, TIMEOUT_S)
    assert not any(slot is slots[-1] or getattr(slots[-1], "inner", None) is slot for slot in stopped.order)
    with pytest.raises(StorageError, match="freed"):
        tier.write(slots[-1], filled(MIB))
    buffer = filled(MIB, 64, 5)
    tier.write(again, buffer).result(TIMEOUT_S)
    assert torch.equal(load(tier, again), buffer)


def test_a_cancelled_slot_is_written_again_and_keeps_its_old_bytes(tier: Tier, stopped: Stopped) -> None:
    stopped.go.set()
    first = filled(MIB, 64, 1)
    slot = store(tier, first)
    stopped.go.clear()
    blockers = [tier.reserve(4096) for _ in range(12)]
    futures = [tier.write(blocker, filled(4096)) for blocker in blockers]
    cancelled = tier.write(slot, filled(MIB, 448, 2))
    assert cancelled.cancel()
    stopped.go.set()
    wait(futures, TIMEOUT_S)
    assert torch.equal(load(tier, slot), first)
    second = filled(MIB, 448, 3)
    tier.write(slot, second).result(TIMEOUT_S)
    assert torch.equal(load(tier, slot), second)


@pytest.mark.parametrize("ending", ["done", "cancelled"])
def test_the_buffer_is_gone_when_the_future_tells(tier: Tier, stopped: Stopped, ending: str) -> None:
    slots = [tier.reserve(9 * MIB) for _ in range(12)]
    futures = [tier.write(slot, filled(9 * MIB)) for slot in slots[:-1]]
    buffer = filled(9 * MIB)
    alive = weakref.ref(buffer)
    seen: list[bool] = []
    last = tier.write(slots[-1], buffer)
    last.add_done_callback(lambda _: seen.append(alive() is None))
    del buffer
    assert alive() is not None, "a transfer that is queued keeps its buffer"
    if ending == "cancelled":
        assert last.cancel()
    stopped.go.set()
    wait([*futures, last], TIMEOUT_S)
    tier.close()  # callbacks run just after the waiters were woken
    assert seen == [True]


def test_urgent_reads_overtake(tier: Tier, stopped: Stopped) -> None:
    stopped.go.set()
    slots = [store(tier, filled(4096, seed=index)) for index in range(24)]
    stopped.go.clear()
    stopped.order.clear()
    into = [empty_at_phase(4096, 0) for _ in slots]
    futures: list[Future[None]] = [tier.read(slot, buffer) for slot, buffer in zip(slots[:-1], into, strict=False)]
    assert stopped.entered.acquire(timeout=TIMEOUT_S)
    futures.append(tier.read(slots[-1], into[-1], urgent=True))
    stopped.go.set()
    wait(futures, TIMEOUT_S)
    last = getattr(slots[-1], "inner", slots[-1])
    threads = sum(part._pools["read"].threads for part in parts(tier))
    assert stopped.order.index(last) <= threads + 1


def test_loads_wait_for_no_store(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = store(tier, filled(4096))
    go = threading.Event()

    def slow(work):
        return lambda transfer, part: (transfer.kind == "read" or go.wait(TIMEOUT_S)) and work(transfer, part)

    for part in parts(tier):
        monkeypatch.setattr(part, "_work", slow(part._work))
    futures = [tier.write(tier.reserve(4096), filled(4096)) for _ in range(24)]
    into = empty_at_phase(4096, 0)
    try:
        tier.read(slot, into).result(10)
    finally:
        go.set()
    assert torch.equal(into, filled(4096))
    wait(futures, TIMEOUT_S)


def test_a_full_tier_says_so_and_works_again_after_a_free(make, kind: str) -> None:
    tier = make(budget_bytes=8 * MIB)
    slots = [tier.reserve(MIB) for _ in range(8)]
    with pytest.raises(TierFullError, match=r"budget of 8\.00 MiB|budget of 4\.00 MiB|budget is 8\.00 MiB"):
        tier.reserve(1)
    assert sum(part.occupied_bytes for part in parts(tier)) <= 8 * MIB
    tier.free(slots[3])
    again = tier.reserve(MIB)
    with pytest.raises(TierFullError):
        tier.reserve(1)
    buffer = filled(MIB, 64)
    tier.write(again, buffer).result(TIMEOUT_S)
    assert torch.equal(load(tier, again), buffer)


def test_misuse_is_refused(tier: Tier) -> None:
    slot = tier.reserve(4096)
    with pytest.raises(StorageError, match="Nothing is stored"):
        tier.read(slot, filled(4096))
    with pytest.raises(ValueError, match="4095 bytes"):
        tier.write(slot, filled(4095))
    with pytest.raises(ValueError, match="uint8"):
        tier.write(slot, torch.zeros(1024))
    tier.free(slot)
    with pytest.raises(StorageError, match="freed"):
        tier.write(slot, filled(4096))


def test_reading_before_the_write_has_ended_is_refused(tier: Tier, stopped: Stopped) -> None:
    slot = tier.reserve(4096)
    future = tier.write(slot, filled(4096))
    with pytest.raises(StorageError, match="before its write has ended"):
        tier.read(slot, filled(4096))
    stopped.go.set()
    future.result(TIMEOUT_S)
    load(tier, slot)


def test_close_cancels_the_queue_and_waits_for_what_runs(tier: Tier, stopped: Stopped) -> None:
    # The first has more parts than there are workers: those that wait in the queue belong to what runs.
    sizes = [64 * MIB] + [4096] * 40
    futures = [tier.write(tier.reserve(size), filled(size)) for size in sizes]
    assert stopped.entered.acquire(timeout=TIMEOUT_S)
    closing = threading.Thread(target=tier.close)
    closing.start()
    wait(futures[-1:], TIMEOUT_S)
    assert futures[-1].cancelled()
    assert not futures[0].done()
    assert closing.is_alive(), "close() waits for the transfer that runs"
    stopped.go.set()
    closing.join(TIMEOUT_S)
    assert futures[0].done()
    assert not futures[0].cancelled()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_shows_and_nothing_is_left(make, directories: list[Path]) -> None:
    gc.collect()
    fds, threads = open_fds(), threading.active_count()
    tier = make()
    slot = store(tier, filled(3 * MIB))
    load(tier, slot)
    assert threading.active_count() > threads
    for directory in directories:
        assert list(directory.iterdir()) == []
    tier.close()
    tier.close()
    tier.free(slot)
    tier.free(slot)
    assert (open_fds(), threading.active_count()) == (fds, threads)
    with pytest.raises(StorageError, match="after close"):
        tier.reserve(1)
    with pytest.raises(StorageError, match="after close"):
        tier.read(slot, filled(3 * MIB))


@pytest.mark.parametrize("kind", ["ram", "disk-direct", "disk-striped"], indirect=True)
def test_a_tier_that_is_dropped_closes_itself(kind: str, directories: list[Path]) -> None:
    from hf_offload.storage.disk import DiskTier
    from hf_offload.storage.ram import RamTier

    gc.collect()
    fds, before = open_fds(), set(threading.enumerate())
    tier: Tier = DiskTier(directories) if directories else RamTier()
    store(tier, filled(MIB))
    workers = set(threading.enumerate()) - before
    assert workers
    assert not directories or open_fds() > fds
    alive = weakref.ref(tier)
    del tier
    gc.collect()
    for worker in workers:
        worker.join(TIMEOUT_S)
        assert not worker.is_alive()
    assert alive() is None
    assert open_fds() == fds


def test_host_view_is_the_memory_of_the_slot(tier: Tier, kind: str) -> None:
    slot = tier.reserve(5000)
    view = tier.host_view(slot)
    if kind.startswith("disk") or kind == "ram-checksum":  # a device's own copy could not be checked
        assert view is None
        return
    assert view is not None
    buffer = filled(5000)
    view.copy_(buffer)
    assert torch.equal(load(tier, slot), buffer)
    assert view.data_ptr() % PAGE == 0


def test_phase_makes_reads_direct(tier: Tier, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kind.startswith("disk-"):
        pytest.skip("only files have a rule for addresses")
    from hf_offload.storage import disk

    slot = store(tier, filled(3 * MIB + 5, 448))
    monkeypatch.setattr(disk, "empty_at_phase", lambda *_: pytest.fail("a staging copy was made"))
    assert torch.equal(load(tier, slot), filled(3 * MIB + 5, 448))


def test_a_spilling_tier_puts_bytes_where_the_plan_wants_them(tmp_path):
    first, then = RamTier(budget_bytes=2 * MIB), DiskTier(tmp_path)
    with contextlib.closing(SpillTier(first, then)) as tier:
        on_disk = tier.reserve(MIB, "ssd")
        assert (first.stats.used_bytes, on_disk.tier) == (0, then)
        anywhere, in_ram = tier.reserve(MIB), tier.reserve(MIB, "ram")
        assert anywhere.tier is in_ram.tier is first
        assert tier.reserve(MIB, "ram").tier is then  # no room: the next best
