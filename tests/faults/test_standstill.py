"""A drive that hangs: system calls that have begun and do not end."""

import errno
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, OffloadError, attach, offload_activations
from hf_offload.engine.ring import PinnedRing
from hf_offload.errors import StandstillError, StorageError
from hf_offload.planning import machine
from hf_offload.planning.machine import probe_machine
from hf_offload.session import attached_session
from hf_offload.storage import disk_io
from hf_offload.storage.buffers import empty_at_phase
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.ram import RamTier
from hf_offload.storage.spill import SpillTier
from hf_offload.storage.tier import Tier
from tests.faults.failing_calls import TIMEOUT_S, Hang
from tests.helpers.loaded_processes import run_python
from tests.helpers.package_threads import OurThreads, open_files

MIB = 1 << 20


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())])


BATCH = torch.linspace(-1, 1, 128 * 64).reshape(128, 64)


def gradients_of(model):
    model.zero_grad()
    model(BATCH).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def settings(tmp_path, **others):
    return OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0, read_ahead_bytes=1, **others)


def test_a_hung_read_is_an_error_and_backward_can_be_repeated(tmp_path, monkeypatch, model):
    expected = gradients_of(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with offload_activations(model, settings(tmp_path)) as session:
        loss = model(BATCH).square().mean()
        session._engine.transfer._wait_for_writes(0)
        hang = Hang(monkeypatch, "read_once")
        model.zero_grad()
        with pytest.raises(
            OffloadError, match=rf"no weight was changed.*{tmp_path}.*0 s, so the drive hangs"
        ) as raised:
            loss.backward(retain_graph=True)
        assert isinstance(raised.value.__cause__, StandstillError)
        assert hang.inside.is_set()
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
        hang.end()  # the drive comes back
        model.zero_grad()
        loss.backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        del loss, raised
        session._engine.transfer.reap()
        assert session._engine.transfer.live_records == 0
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_what_a_hung_read_writes_late_is_not_what_backward_uses(tmp_path, monkeypatch):
    """The buffer of a load that was given up is not used again: the call may still write into it."""
    tier = DiskTier(tmp_path)
    slot = tier.reserve(MIB)
    tier.write(slot, empty_at_phase(MIB, 0).fill_(7)).result(TIMEOUT_S)
    hang = Hang(monkeypatch, "read_once")
    given_up = empty_at_phase(MIB, tier.phase(slot)).zero_()
    future = tier.read(slot, given_up)
    address = given_up.data_ptr()
    with pytest.raises(StandstillError):
        tier.wait_for(lambda seconds: future.done() or threading.Event().wait(seconds))
    del given_up
    assert all(empty_at_phase(MIB, 0).data_ptr() != address for _ in range(20)), "the memory was given to somebody else"
    tier.free(slot)
    assert tier.stats.used_bytes == MIB, "the room was given to somebody else"
    hang.end()
    future.result(TIMEOUT_S)
    tier.close()
    assert tier.stats.used_bytes == 0


def test_a_hung_write_is_an_error_of_forward(tmp_path, monkeypatch, model):
    expected = gradients_of(model)
    with offload_activations(model, settings(tmp_path)) as session:
        session._engine._write_behind_bytes = BATCH.nbytes
        hang = Hang(monkeypatch, "write_once")
        with pytest.raises(StandstillError, match=r"not finished a single call.*another drive"):
            model(BATCH)
        assert session._engine.transfer._writes.nbytes <= 3 * BATCH.nbytes, "memory was filled behind a hung drive"
        hang.end()
        found = gradients_of(model)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_run_ends_although_its_drive_hangs(tmp_path, monkeypatch, caplog):
    tier = DiskTier(tmp_path)
    slot = tier.reserve(MIB)
    hang = Hang(monkeypatch, "write_once")
    future = tier.write(slot, empty_at_phase(MIB, 0).fill_(1))
    assert hang.inside.wait(TIMEOUT_S)
    descriptors = {tier.files[0]._fd, tier.files[0]._buffered_fd}
    tier.close()
    assert "abandoned" in caplog.text
    for descriptor in descriptors:
        os.fstat(descriptor)  # still open: the call that hangs goes on with this number
    closing = [thread for thread in threading.enumerate() if thread.name == "hf_offload-ssd-close"]
    hang.end()
    future.result(TIMEOUT_S)
    for thread in closing:
        thread.join(TIMEOUT_S)
    assert closing
    assert tier.files[0]._fd == -1


def test_ctrl_c_while_a_tier_closes_leaves_the_rest_to_a_thread(tmp_path, monkeypatch, our_threads):
    tier = DiskTier(tmp_path)
    hang = Hang(monkeypatch, "write_once")
    tier.write(tier.reserve(MIB), empty_at_phase(MIB, 0).fill_(1))
    assert hang.inside.wait(TIMEOUT_S)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tier, "wait_for", interrupted)
        tier.close()
    assert open_files(tmp_path)
    hang.end()
    our_threads.join(TIMEOUT_S)
    assert open_files(tmp_path) == []


def interrupted(*arguments):
    raise KeyboardInterrupt


def test_a_drive_that_hangs_ends_its_measurement(tmp_path, monkeypatch, our_threads):
    hangs = []

    def opened(directory):
        tier = DiskTier(directory)
        hangs.append(Hang(monkeypatch, "write_once"))  # not before: opening writes, too
        return tier

    monkeypatch.setattr(machine, "DiskTier", opened)
    with pytest.raises(StandstillError, match=rf"{tmp_path}\) has not finished a single call"):
        probe_machine([tmp_path], sample_bytes=8 * MIB)
    hangs[0].end()
    our_threads.join(TIMEOUT_S)
    assert open_files(tmp_path) == []


# -- calls that open, enlarge and close files ------------------------------------------------------------------------------


@pytest.fixture
def our_threads():
    return OurThreads()


def test_a_file_that_does_not_open_is_an_error_at_the_start_and_closed_should_it_open_after_all(
    tmp_path, monkeypatch, model, our_threads
):
    expected = gradients_of(model)
    hang = Hang(monkeypatch, "open_once")
    with pytest.raises(
        StandstillError, match=rf"{tmp_path}\) has not finished a single call.*name a directory on another"
    ):
        attach(model, settings(tmp_path))
    assert attached_session(model) is None
    assert all(torch.equal(one, other) for one, other in zip(expected, gradients_of(model), strict=True))
    hang.end()
    our_threads.join(TIMEOUT_S)
    assert open_files(tmp_path) == []
    with offload_activations(model, settings(tmp_path)) as session:
        gradients_of(model)
    assert session.stats.total.refused_bytes == 0


def test_a_file_that_does_not_grow_is_an_error_of_forward_and_its_room_is_used_should_it_come(
    tmp_path, monkeypatch, model, our_threads
):
    expected = gradients_of(model)
    with offload_activations(model, settings(tmp_path, disk_budget="1MiB")) as session:
        tier = session._engine.transfer.tier
        hang = Hang(monkeypatch, "allocate_once")
        for _ in range(2):
            with pytest.raises(StandstillError, match="not finished a single call"):
                model(BATCH)
        assert tier.stats.used_bytes == tier.occupied_bytes == 0
        hang.end()
        found = gradients_of(model)
        assert session.stats.total.refused_bytes == 0
        assert tier.occupied_bytes == MIB, "one of the growths that were given up"
        session._engine.transfer.reap()
        assert tier._is_quiet(TIMEOUT_S)
        assert (tier.stats.used_bytes, session._engine.transfer.live_records) == (0, 0)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    our_threads.join(TIMEOUT_S)


def test_room_that_a_hung_drive_left_half_taken_is_given_back(tmp_path, monkeypatch, our_threads):
    """Striped over two drives, of which the second hangs, and scattered over the gaps of a file that cannot grow more."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    tier = DiskTier([tmp_path / "a", tmp_path / "b"], chunk_bytes=MIB)
    first = tier.reserve(MIB)
    hang = Hang(monkeypatch, "allocate_once")
    with pytest.raises(StandstillError):
        tier.reserve(4 * MIB)
    tier.free(first)
    assert tier._room.used_bytes == 0
    hang.end()
    our_threads.join(TIMEOUT_S)
    assert tier.reserve(4 * MIB).nbytes == 4 * MIB
    tier.close()


def test_files_that_do_not_close_hold_up_no_detach(tmp_path, monkeypatch, model, caplog, our_threads):
    session = attach(model, settings(tmp_path))
    gradients_of(model)
    hang = Hang(monkeypatch, "close_once")
    session.detach()
    assert "which a thread will close" in caplog.text
    assert attached_session(model) is None
    assert open_files(tmp_path)
    hang.end()
    our_threads.join(TIMEOUT_S)
    assert open_files(tmp_path) == []


def test_an_error_of_closing_is_told_and_ends_no_run(tmp_path, monkeypatch, model, caplog):
    session = attach(model, settings(tmp_path))
    gradients_of(model)
    real = disk_io.close_once

    def close(descriptor):
        real(descriptor)  # as the kernel does, whatever it says
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk_io, "close_once", close)
    session.detach()
    assert f"Closing the offload file in {tmp_path}: Input/output error" in caplog.text
    assert attached_session(model) is None
    assert open_files(tmp_path) == []


def test_ctrl_c_ends_the_wait_for_a_drive_that_hangs(tmp_path):
    """In a process of its own: a signal, and a limit that would not be reached."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    sides = ["open_once", "allocate_once", "write_once", "read_once", "close_once"]
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), *sides]
    done = run_python(command, env=environment, timeout=200)
    assert (done.returncode, done.stdout.split()) == (0, sides), done.stderr


INTERRUPTED = """
import os, signal, sys, threading, time
import torch
from torch import nn
from hf_offload import OffloadConfig, attach
from hf_offload.storage import disk_io
from hf_offload.storage.tier import Tier

Tier.stall_limit_s = 1e6
directory, *sides = sys.argv[1:]
training, ended = threading.get_ident(), []

waiting, wait_for = threading.Event(), Tier.wait_for

def tell(tier, wait):
    if threading.get_ident() != training:
        return wait_for(tier, wait)
    waiting.set()
    try:
        return wait_for(tier, wait)
    finally:
        waiting.clear()

Tier.wait_for = tell  # sys._current_frames() would tell, too, and now and then stops all threads for ever

def hang(*arguments):
    if once:
        threading.Thread(target=once.pop(), daemon=True).start()
    threading.Event().wait()

def interrupt():
    # Not before the training waits, however long that takes; and again if it has found the training in a finalizer.
    mine = list(ended)
    while ended == mine:
        if waiting.wait(0.01):
            signal.pthread_kill(training, signal.SIGINT)
            time.sleep(5)

def train(side):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    if side == "open_once":
        disk_io.open_once = hang
    session = attach(model, OffloadConfig(tier="ssd", directory=directory, min_bytes=0, read_ahead_bytes=1))
    if side in ("allocate_once", "write_once"):
        setattr(disk_io, side, hang)
    loss = model(torch.ones(64, 64)).sum()
    session._engine.transfer._wait_for_writes(0)
    if side == "read_once":
        disk_io.read_once = hang
    loss.backward()
    if side == "close_once":
        disk_io.close_once = hang
    session.detach()

for side in sides:
    real, once = getattr(disk_io, side), [interrupt]
    try:
        train(side)
    except KeyboardInterrupt:
        ended.append(side)
    setattr(disk_io, side, real)
print(*ended, flush=True)
os._exit(0)  # threads that hang for ever would be waited for
"""


def test_a_process_ends_although_a_call_hangs():
    script = """
import threading
from hf_offload.storage.workers import WorkerPool
begun = threading.Event()
WorkerPool("w", 1).submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""
    subprocess.run([sys.executable, "-c", script], timeout=TIMEOUT_S / 3, check=True)


def test_a_slow_drive_is_waited_for(tmp_path, monkeypatch, model):
    """No call takes long, and those that one wait is for take far longer together than the limit."""
    model, batch = model[:2], BATCH.repeat(8, 1)
    limit_s, call_s = 0.4, 0.05
    calls = []

    def step():
        model.zero_grad()
        loss = model(batch).square().mean()
        session._engine.transfer._wait_for_writes(0)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def slow(side):
        real = getattr(disk_io, side)

        def call(*arguments):
            calls.append(side)
            threading.Event().wait(call_s)
            return real(*arguments)

        monkeypatch.setattr(disk_io, side, call)

    with offload_activations(model, settings(tmp_path)) as session:
        tier = session._engine.transfer.tier
        tier.chunk_bytes = 4096
        expected = step()  # from now on the files need not grow
        slow("read_once")
        slow("write_once")
        monkeypatch.setattr(Tier, "stall_limit_s", limit_s)
        found = step()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    # One tensor is loaded, by all threads together: one wait.
    assert calls.count("read_once") * call_s / tier._pools["read"].threads > 1.5 * limit_s
    assert session.stats.total.store_stall_s > 0
    assert session.stats.total.refused_bytes == 0


class Looks:
    """A wait that never ends, and a tier that does what ``during`` says each time somebody has looked."""

    def __init__(self, tier, during, most=100):
        self.count = 0
        tier.wait_for(lambda seconds: self._look(tier, during, most))

    def _look(self, tier, during, most):
        self.count += 1
        during(tier.stats, self.count)
        return self.count == most


def test_a_standstill_is_no_ended_call_while_one_runs():
    tier = RamTier()
    assert Looks(tier, lambda stats, look: None).count == 100, (
        "nothing runs: whatever is waited for, it is not the tier"
    )
    assert Looks(tier, lambda stats, look: (stats.begin("read"), stats.end("read", 1))).count == 100
    tier.stats.begin("write")
    assert Looks(tier, lambda stats, look: stats.count("read", 1) or look % 9 or _one(stats)).count == 100
    with pytest.raises(StandstillError, match=r"ram tier \(memory\).* 120 s"):
        Looks(tier, lambda stats, look: None)
    looks = []
    with pytest.raises(StandstillError):
        Looks(tier, lambda stats, look: looks.append(look))
    assert len(looks) == 2, "what is known to stand still is waited for in full again"
    tier.stats.end("write", 1)
    tier.close()


def _one(stats):
    stats.begin("read")
    stats.end("read", 1)


def test_a_tier_of_two_stands_still_when_its_disk_does(tmp_path, monkeypatch):
    tier = SpillTier(RamTier(MIB), DiskTier(tmp_path))
    slots = [tier.reserve(MIB) for _ in range(2)]
    hang = Hang(monkeypatch, "write_once")
    futures = [tier.write(slot, empty_at_phase(MIB, 0).fill_(3)) for slot in slots]
    futures[0].result(TIMEOUT_S)
    with pytest.raises(StandstillError, match=rf"ram\+ssd tier \(memory, {tmp_path}\)"):
        tier.wait_for(lambda seconds: futures[1].done() or threading.Event().wait(seconds))
    hang.end()
    futures[1].result(TIMEOUT_S)
    tier.close()


def test_room_in_the_pinned_ring_is_not_waited_for_behind_a_hung_drive(monkeypatch):
    monkeypatch.setattr(Tier, "stall_limit_s", 0.3)
    tier = RamTier()
    ring = PinnedRing(MIB, pinned=False)
    ring.behind = tier
    ring.acquire(MIB // 2)
    tier.stats.begin("write")
    with pytest.raises(StandstillError):
        ring.acquire(MIB // 2)
    tier.stats.end("write", 0)
    ring.close()
    tier.close()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_fork_does_not_wait_for_a_hung_call_and_the_call_counts_as_failed(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path)
    tier.gate.limit_s = 0.2
    slot = tier.reserve(MIB)
    tier.write(slot, empty_at_phase(MIB, 0).fill_(1)).result(TIMEOUT_S)
    hang = Hang(monkeypatch, "read_once")
    future = tier.read(slot, empty_at_phase(MIB, tier.phase(slot)))
    assert hang.inside.wait(TIMEOUT_S)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    hang.end()
    with pytest.raises(StorageError, match=rf"forked meanwhile.*errno {errno.EIO}"):
        future.result(TIMEOUT_S)
    again = empty_at_phase(MIB, tier.phase(slot)).zero_()
    tier.read(slot, again).result(TIMEOUT_S)
    assert bool((again == 1).all())
    tier.close()
