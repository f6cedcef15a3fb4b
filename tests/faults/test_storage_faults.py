"""A failing drive, put where the system calls are made."""

import errno
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from hf_offload.errors import OffloadConfigError, StorageError, TierFullError
from hf_offload.storage import disk_io, ram
from hf_offload.storage.buffers import empty_at_phase
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.ram import RamTier
from hf_offload.storage.service import RunStorage

MIB = 1 << 20
TIMEOUT_S = 60


def filled(nbytes: int, phase: int = 64, seed: int = 0) -> torch.Tensor:
    return empty_at_phase(nbytes, phase).random_(0, 256, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def tier(tmp_path, request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(disk_io, "probe_direct_io", lambda *_: disk_io.DirectIo(False, 1, "for this test"))
    tier = DiskTier(tmp_path, chunk_bytes=MIB)
    yield tier
    tier.close()


def store(tier, buffer):
    slot = tier.reserve(buffer.numel())
    tier.write(slot, buffer).result(TIMEOUT_S)
    return slot


def load(tier, slot):
    into = empty_at_phase(slot.nbytes, tier.phase(slot)).zero_()
    tier.read(slot, into).result(TIMEOUT_S)
    return into


def fail(number):
    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "smaller disk_budget"), (errno.EIO, "another drive"), (errno.ENXIO, "Check the")],
)
def test_a_failed_write_names_file_offset_cause_and_remedy(tier, tmp_path, monkeypatch, number, advice):
    before, slot = store(tier, filled(MIB)), store(tier, filled(4 * MIB, 64, 1))
    with monkeypatch.context() as broken:
        broken.setattr(disk_io, "write_once", fail(number))
        error = tier.write(slot, filled(4 * MIB)).exception(TIMEOUT_S)
    assert isinstance(error, StorageError)
    for word in ("Writing to", str(tmp_path), "at offset", os.strerror(number), f"errno {number}", advice):
        assert word in str(error)
    with pytest.raises(StorageError, match="Nothing is stored"):
        tier.read(slot, filled(4 * MIB))
    # The tier goes on: other slots are whole, and the failed one can be tried again.
    assert torch.equal(load(tier, before), filled(MIB))
    tier.write(slot, filled(4 * MIB, 448, 2)).result(TIMEOUT_S)
    assert torch.equal(load(tier, slot), filled(4 * MIB, 448, 2))
    tier.free(slot)
    tier.free(before)
    assert tier.stats.used_bytes == 0


def test_a_failed_read_names_file_offset_and_cause(tier, tmp_path, monkeypatch):
    slot = store(tier, filled(4 * MIB))
    with monkeypatch.context() as broken:
        broken.setattr(disk_io, "read_once", fail(errno.EIO))
        error = tier.read(slot, filled(4 * MIB)).exception(TIMEOUT_S)
    assert isinstance(error, StorageError)
    assert f"Reading from {tmp_path}" in str(error)
    assert os.strerror(errno.EIO) in str(error)
    assert torch.equal(load(tier, slot), filled(4 * MIB))


def test_a_failed_transfer_lets_its_buffer_go_and_stops_early(tier, monkeypatch):
    buffer = filled(64 * MIB)
    alive = weakref.ref(buffer)
    calls = []

    def broken(fd, data, offset):
        calls.append(offset)
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(disk_io, "write_once", broken)
    slot = tier.reserve(64 * MIB)
    seen = []
    future = tier.write(slot, buffer)
    del buffer
    future.add_done_callback(lambda _: seen.append(alive() is None))
    assert isinstance(future.exception(TIMEOUT_S), StorageError)
    tier.close()
    assert seen == [True]
    assert len(calls) < 10, "63 more chunks were tried after the first failure"


@pytest.mark.parametrize("step", [1, 513])
@pytest.mark.parametrize("side", ["write_once", "read_once"])
def test_short_transfers_are_finished(tier, monkeypatch, side, step):
    buffer = filled(2 * MIB + 77)
    slot = tier.reserve(buffer.numel())
    short = []

    real = getattr(disk_io, side)

    def cut_short(fd, data, offset):
        # Only the first call of every MiB is cut short. The rest goes by another descriptor if the
        # cut was inside a block.
        if offset % MIB == 0:
            short.append(fd)
            scratch = os.dup(tier.files[0]._buffered_fd)
            try:
                return real(scratch, data[:step], offset)
            finally:
                os.close(scratch)
        return real(fd, data, offset)

    if side == "write_once":
        with monkeypatch.context() as broken:
            broken.setattr(disk_io, side, cut_short)
            tier.write(slot, buffer).result(TIMEOUT_S)
        assert torch.equal(load(tier, slot), buffer)
    else:
        tier.write(slot, buffer).result(TIMEOUT_S)
        with monkeypatch.context() as broken:
            broken.setattr(disk_io, side, cut_short)
            assert torch.equal(load(tier, slot), buffer)
    assert short


@pytest.mark.parametrize("side", ["write_once", "read_once"])
def test_interrupted_calls_are_repeated(tier, monkeypatch, side):
    interruptions = iter([True] * 5)

    real = getattr(disk_io, side)

    def interrupted(fd, data, offset):
        if next(interruptions, False):
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        return real(fd, data, offset)

    monkeypatch.setattr(disk_io, side, interrupted)
    assert torch.equal(load(tier, store(tier, filled(MIB))), filled(MIB))
    assert not next(interruptions, False)


@pytest.mark.parametrize("side", ["write_once", "read_once"])
def test_a_drive_that_moves_nothing_is_an_error_not_a_loop(tier, monkeypatch, side):
    slot = store(tier, filled(MIB))
    monkeypatch.setattr(disk_io, side, lambda *_: 0)
    future = tier.write(slot, filled(MIB)) if side == "write_once" else tier.read(slot, filled(MIB))
    with pytest.raises(StorageError, match=r"no more|ended after"):
        future.result(TIMEOUT_S)


def test_a_full_disk_is_a_full_tier_and_existing_room_is_used_up(tmp_path, monkeypatch):
    with_room = DiskTier(tmp_path)
    first = with_room.reserve(MIB)
    monkeypatch.setattr(disk_io, "allocate_once", fail(errno.ENOSPC))
    slots = [with_room.reserve(MIB) for _ in range(255)]
    with pytest.raises(TierFullError, match=rf"{tmp_path} \(No space left on device\)"):
        with_room.reserve(1)
    with_room.free(slots[10])
    with_room.free(slots[20])
    scattered = with_room.reserve(2 * MIB)  # no gap holds it in one piece
    with_room.write(scattered, filled(2 * MIB)).result(TIMEOUT_S)
    assert torch.equal(load(with_room, scattered), filled(2 * MIB))
    with_room.free(first)
    with_room.close()


def test_one_full_drive_of_two_leaves_the_other(tmp_path, monkeypatch):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    tier = DiskTier(paths, chunk_bytes=MIB)
    full_fd = tier.files[1]._buffered_fd
    real = disk_io.allocate_once

    def allocate(fd, offset, nbytes):
        if fd == full_fd:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, nbytes)

    monkeypatch.setattr(disk_io, "allocate_once", allocate)
    for nbytes in (4096, 8 * MIB):  # one that is not striped and one that would be
        slot = store(tier, filled(nbytes))
        assert {piece.file for piece in slot.pieces} == {0}
        assert torch.equal(load(tier, slot), filled(nbytes))
        tier.free(slot)
        assert tier._room.used_bytes == 0
    tier.close()


def test_large_slots_use_every_drive(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    tier = DiskTier(paths, chunk_bytes=MIB)
    slot = tier.reserve(10 * MIB + 5)
    assert [piece.file for piece in slot.pieces] == [0, 1, 2]
    assert sum(piece.nbytes for piece in slot.pieces) == slot.room_bytes
    assert max(piece.nbytes for piece in slot.pieces) - min(piece.nbytes for piece in slot.pieces) <= 2 * MIB
    small = [tier.reserve(MIB) for _ in range(6)]
    assert sorted(slot.pieces[0].file for slot in small) == [0, 0, 1, 1, 2, 2]
    tier.close()


def test_the_write_limit_stops_reservations_and_counts_what_was_written(tmp_path):
    tier = DiskTier(tmp_path, storage=RunStorage(written_bytes=3 * MIB))
    unused = tier.reserve(MIB)
    slot = store(tier, filled(MIB))
    tier.free(unused)  # never written: not spent
    other = store(tier, filled(MIB))
    tier.write(slot, filled(MIB)).result(TIMEOUT_S)
    tier.free(other)
    with pytest.raises(TierFullError, match="max_disk_write_bytes=3"):
        tier.reserve(1)
    with pytest.raises(TierFullError, match="max_disk_write_bytes=3"):
        tier.write(slot, filled(MIB))
    assert tier.stats.written_bytes <= 3 * MIB
    tier.close()


def test_a_cancelled_write_is_not_spent(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, storage=RunStorage(written_bytes=6 * MIB), write_threads=1)
    inside, go = threading.Event(), threading.Event()
    real = disk_io.write_once

    def slow(fd, data, offset):
        inside.set()
        assert go.wait(TIMEOUT_S)
        return real(fd, data, offset)

    monkeypatch.setattr(disk_io, "write_once", slow)
    first, second = tier.reserve(2 * MIB), tier.reserve(4 * MIB)
    running = tier.write(first, filled(2 * MIB))
    assert inside.wait(TIMEOUT_S)
    for _ in range(3):
        assert tier.write(second, filled(4 * MIB)).cancel()
    tier.free(second)
    third = tier.reserve(4 * MIB)
    go.set()
    running.result(TIMEOUT_S)
    tier.write(third, filled(4 * MIB)).result(TIMEOUT_S)
    assert tier.stats.written_bytes <= 6 * MIB
    tier.close()


def test_checksums_find_a_flipped_bit_and_say_where(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, chunk_bytes=MIB, checksum=True)
    slot = store(tier, filled(3 * MIB))
    real = disk_io.read_once

    def flip(fd, into, offset):
        count = real(fd, into, offset)
        if offset == 2 * MIB:
            into[1234] ^= 1
        return count

    monkeypatch.setattr(disk_io, "read_once", flip)
    for phase in (tier.phase(slot), 1):  # read in place, and through the staging copy
        with pytest.raises(StorageError, match=rf"{tmp_path}.* at offset {2 * MIB} .*checksums differ"):
            tier.read(slot, empty_at_phase(3 * MIB, phase)).result(TIMEOUT_S)
    tier.close()


def test_checksums_cover_the_ends_that_stay_in_memory(tmp_path):
    tier = DiskTier(tmp_path, checksum=True)
    slot = store(tier, filled(8192 + 40))
    slot.image.tail = bytes(len(slot.image.tail)) or b""
    slot.image.lead = bytes(len(slot.image.lead))
    with pytest.raises(StorageError, match="have changed"):
        load(tier, slot)
    tier.close()


def test_checksums_find_changed_ram():
    tier = RamTier(checksum=True)
    slot = store(tier, filled(MIB))
    slot.arena.data[slot.offset + 77] ^= 1
    with pytest.raises(StorageError, match="checksums differ"):
        load(tier, slot)
    tier.close()


def test_pinned_memory_without_a_device_is_a_configuration_error():
    if torch.cuda.is_available():
        pytest.skip("this machine can pin memory")
    tier = RamTier(pinned=True)
    with pytest.raises(OffloadConfigError, match="pinned=False"):
        tier.reserve(MIB)
    tier.close()


def test_ram_arenas_go_back_to_the_system():
    tier = RamTier(arena_bytes=MIB, retained_bytes=2 * MIB)
    slots = [tier.reserve(MIB) for _ in range(5)]
    assert tier.occupied_bytes == 5 * MIB
    for slot in slots:
        tier.free(slot)
    assert tier.occupied_bytes == 2 * MIB
    tier.close()
    assert tier.occupied_bytes == 0


def test_idle_ram_arenas_make_way_for_a_larger_slot():
    tier = RamTier(8 * MIB, arena_bytes=MIB)
    for slot in [tier.reserve(MIB) for _ in range(8)]:
        tier.free(slot)
    tier.reserve(8 * MIB)
    assert tier.occupied_bytes == 8 * MIB
    tier.close()


def test_a_slot_in_ram_goes_to_the_fullest_arena_so_that_idle_ones_can_go():
    tier = RamTier(arena_bytes=4 * MIB, retained_bytes=0)
    slots = [tier.reserve(2 * MIB) for _ in range(4)]
    tier.free(slots[2])
    tier.reserve(MIB)  # 1 MiB is left of the second arena
    tier.free(slots[0])  # and 2 MiB of the first
    assert tier.reserve(MIB).arena is slots[3].arena
    tier.free(slots[1])
    assert tier.occupied_bytes == 4 * MIB
    tier.close()


def test_a_slot_in_ram_may_be_freed_after_close():
    tier = RamTier(arena_bytes=MIB)
    slots = [tier.reserve(MIB) for _ in range(2)]
    tier.close()
    for slot in slots:
        tier.free(slot)
    assert tier.stats.used_bytes == tier.occupied_bytes == 0


def test_pinned_arenas_waste_nothing_on_powers_of_two(monkeypatch):
    allocated = []
    monkeypatch.setattr(
        ram.RamTier, "_allocate", lambda self, n: allocated.append(n) or torch.empty(n, dtype=torch.uint8)
    )
    tier = RamTier(11 * MIB, pinned=True, arena_bytes=4 * MIB)
    slots = [tier.reserve(MIB + 4096) for _ in range(3)] + [tier.reserve(6 * MIB)]
    assert allocated == [4 * MIB, 6 * MIB]
    assert tier.stats.used_bytes == 9 * MIB + 3 * 4096
    assert len(slots) == 4
    tier.close()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_fork_waits_for_running_calls_and_the_child_is_told(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path)
    slot = store(tier, filled(MIB))
    inside, go = threading.Event(), threading.Event()
    finished: list[float] = []
    real = disk_io.read_once

    def slow(fd, into, offset):
        inside.set()
        assert go.wait(TIMEOUT_S)
        count = real(fd, into, offset)
        finished.append(time.monotonic())
        return count

    monkeypatch.setattr(disk_io, "read_once", slow)
    into = empty_at_phase(MIB, tier.phase(slot))
    future = tier.read(slot, into)
    assert inside.wait(TIMEOUT_S)
    held = threading.Event()
    real_hold = tier.gate.hold

    def hold():
        # The read is let go only after the fork has begun to wait for it.
        threading.Timer(0.05, go.set).start()
        held.set()
        real_hold()

    monkeypatch.setattr(tier.gate, "hold", hold)
    fds = {tier.files[0]._fd, tier.files[0]._buffered_fd}
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _child(tier, slot, fds, bool(finished))
        finally:
            os._exit(code)
    assert held.is_set()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    future.result(TIMEOUT_S)
    assert torch.equal(into, filled(MIB))
    monkeypatch.undo()
    again = store(tier, filled(2 * MIB, 448, 9))
    assert torch.equal(load(tier, again), filled(2 * MIB, 448, 9))
    tier.close()


def _child(tier, slot, fds, read_had_ended):
    """Exit status of the forked child; each number is another promise that was broken."""
    if not read_had_ended:
        return 2
    for fd in fds:
        if Path(f"/proc/self/fd/{fd}").exists():
            return 3
    for call in (lambda: tier.reserve(1), lambda: tier.read(slot, torch.empty(MIB, dtype=torch.uint8))):
        try:
            call()
        except StorageError as error:
            if "forked process" not in str(error):
                return 4
        else:
            return 5
    tier.free(slot)
    tier.close()
    return 0
