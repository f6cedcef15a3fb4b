"""Training steps on a faulty drive: each is right to the bit, or ends in one clear error that a run recovers from."""

import errno
import gc
import itertools
import os
import random
import re
import shutil
import subprocess
import threading
import time

import pytest
import torch

from hf_offload import OffloadConfig, OffloadError, offload_activations
from hf_offload.errors import StorageError
from hf_offload.storage import disk_io
from hf_offload.storage.file_systems import MEMORY_FILE_SYSTEMS
from tests.faults.failing_calls import ALL, Faults, Hang
from tests.faults.trainers import AfterStep, trainer_in
from tests.helpers.tiny_models import gradients, tiny_batch, tiny_model, weights
from tests.helpers.train import assert_same

SEED = 5


def settings(directory, **others):
    return OffloadConfig(tier="ssd", directory=directory, min_bytes=0, read_ahead_bytes=1, **others)


def step(model, session=None, before_backward=lambda: None):
    """Gradients of one step with dropout. Everything has left memory before backward asks for it."""
    model.zero_grad()
    torch.manual_seed(SEED)
    loss = model(**tiny_batch("gpt2")).loss
    if session is not None:
        session._engine.transfer._wait_for_writes(0)
    before_backward()
    loss.backward()
    return gradients(model)


@pytest.fixture
def expected():
    return step(tiny_model("gpt2"))


def assert_nothing_left(session):
    """No record, no slot, no byte. A worker may hold the last record for another instant, having told of its end."""
    transfer = session._engine.transfer
    deadline = time.monotonic() + 60
    while True:
        transfer._wait_for_writes(0)
        transfer.reap()
        left = (
            transfer.live_records,
            transfer.ledger.resident_bytes,
            transfer.ledger.own_bytes,
            transfer.tier.stats.used_bytes,
        )
        if left == (0, 0, 0, 0) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert left == (0, 0, 0, 0)


def failed_step(model, session, before_backward=lambda: None):
    """What the step's error says."""
    message = step_or_error(model, session, {}, before_backward)
    assert message.startswith(StorageError.__name__)
    return message


def step_or_error(model, session, expected, before_backward=lambda: None):
    """What the step's error says; nothing if its gradients are those ``expected``. Nothing of it is kept: what it held is
    gone now, without the garbage collector.
    """
    message = ""
    gc.disable()
    try:
        try:
            assert_same(expected, step(model, session, before_backward))
        except OffloadError as error:
            message = f"{type(error.__cause__).__name__}: {error}"
        # Autograd itself keeps the nodes that were next in line until this thread goes backward again.
        torch.ones(1, requires_grad=True).sum().backward()
        assert_nothing_left(session)
    finally:
        gc.enable()
    return message


def calls_of_a_step(tmp_path, side):
    with pytest.MonkeyPatch.context() as patch, offload_activations(tiny_model("gpt2"), settings(tmp_path)) as session:
        counting = Faults(patch, side, 0, ())
        step(session._model(), session)
    return counting.calls


def test_whichever_write_fails_the_step_is_right(tmp_path, monkeypatch, expected, caplog):
    """The drive is full and has an error in turns, and once each for all writes."""
    count = calls_of_a_step(tmp_path, "write_once")
    assert count > 30
    model = tiny_model("gpt2")
    cases = [*({number} for number in range(count)), range(0, count, 2), ALL, ALL]
    for which, number in zip(cases, itertools.cycle((errno.ENOSPC, errno.EIO)), strict=False):
        with offload_activations(model, settings(tmp_path)) as session, monkeypatch.context() as patch:
            faults = Faults(patch, "write_once", number, which)
            assert_same(expected, step(model, session))
            assert faults.failed > 0
            assert session.stats.total.refused_bytes > 0
            assert_nothing_left(session)
    assert caplog.text.count("The ssd tier refused") == len(cases), "once a run"


def test_whoever_waits_for_writes_waits_until_it_is_settled_what_becomes_of_their_bytes(tmp_path, monkeypatch):
    """A future wakes who waits for it before it calls back, and only then are bytes let go of, or counted as refused."""
    begin, go = threading.Event(), threading.Event()
    with offload_activations(torch.nn.Linear(8, 8), settings(tmp_path)) as session:
        Faults(monkeypatch, "write_once", errno.EIO, ALL)
        failing = disk_io.write_once
        monkeypatch.setattr(disk_io, "write_once", lambda *arguments: begin.wait(60) and failing(*arguments))
        transfer = session._engine.transfer
        real = transfer.mover.store

        def store(*arguments):
            future = real(*arguments)
            future.add_done_callback(lambda _: go.wait(60))
            return future

        monkeypatch.setattr(transfer.mover, "store", store)
        leaf = torch.linspace(0, 1, 4096, requires_grad=True)
        loss = (leaf * 2).sin().sum()
        begin.set()
        waiting = threading.Thread(target=transfer._wait_for_writes, args=(0,), daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        go.set()
        waiting.join(60)
        assert session.stats.total.refused_bytes == leaf.nbytes
        loss.backward()
    assert torch.equal(leaf.grad, 2 * (leaf * 2).cos())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_file_that_cannot_grow_leaves_the_step_right(tmp_path, monkeypatch, expected, caplog, number):
    model = tiny_model("gpt2")
    with offload_activations(model, settings(tmp_path)) as session:
        Faults(monkeypatch, "allocate_once", number, ALL)
        assert_same(expected, step(model, session))
        assert session.stats.total.written_bytes == 0
        assert_nothing_left(session)
    assert os.strerror(number) in caplog.text


def test_an_interrupted_growth_is_tried_again(tmp_path, monkeypatch, expected):
    model = tiny_model("gpt2")
    with offload_activations(model, settings(tmp_path)) as session:
        faults = Faults(monkeypatch, "allocate_once", errno.EINTR, {0, 1})
        assert_same(expected, step(model, session))
        assert faults.failed == 2
        assert session.stats.total.refused_bytes == 0


def test_what_write_back_has_lost_reaches_no_gradient(tmp_path, monkeypatch, expected):
    """Where files cannot be written directly, the page cache takes everything, and what comes of it is told later."""
    monkeypatch.setattr(disk_io, "probe_direct_io", lambda *_: disk_io.DirectIo(False, 1, "not here"))
    model = tiny_model("gpt2")
    with offload_activations(model, settings(tmp_path)) as session:
        if session._engine.transfer.tier.files[0].file_system in MEMORY_FILE_SYSTEMS:
            pytest.skip("the temporary directory is a tmpfs, which writes nothing back")
        assert_same(expected, step(model, session))
        faults = Faults(monkeypatch, "settle_once", errno.EIO, {5})
        assert "lost something" in failed_step(model, session)
        assert faults.failed == 1
        session.end_step()
        assert_same(expected, step(model, session))
        assert session.stats.step.refused_bytes > 0
        assert_nothing_left(session)


def test_ctrl_c_in_a_store_leaves_nothing(tmp_path, monkeypatch, expected):
    model = tiny_model("gpt2")
    with offload_activations(model, settings(tmp_path)) as session:
        mover = session._engine.transfer.mover
        real, stores = mover.store, iter(range(5))

        def store(*arguments):
            if next(stores, None) is None:
                raise KeyboardInterrupt
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(mover, "store", store)
            stopped = False
            try:
                step(model, session)
            except KeyboardInterrupt:
                stopped = True
        assert stopped
        assert_nothing_left(session)
        assert_same(expected, step(model, session))


def test_whichever_read_fails_the_step_is_right_or_ends_and_can_be_repeated(tmp_path, monkeypatch, expected):
    """What could not be read ahead is read again when it is needed."""
    count = calls_of_a_step(tmp_path, "read_once")
    assert count > 30
    model = tiny_model("gpt2")
    before, ended = weights(model), set()
    message = rf"Activations of .* no weight was changed.*Reading from {tmp_path}.*kernel's log"
    with offload_activations(model, settings(tmp_path)) as session:
        for which in ({0}, {1}, {count // 2}, {count - 1}, ALL):
            with monkeypatch.context() as patch:
                faults = Faults(patch, "read_once", errno.EIO, which)
                said = step_or_error(model, session, expected)
                ended.add(bool(said))
                assert re.search(message if said or which is ALL else "^$", said)
                assert faults.failed > 0
            assert_same(before, weights(model))
            assert_same(expected, step(model, session))
            assert_nothing_left(session)
    assert ended == {True, False}


def test_every_flipped_bit_on_the_drive_is_found(tmp_path, expected):
    """The bytes are changed in the file itself, behind the engine's back."""
    model = tiny_model("gpt2")
    chance = random.Random(0)
    with offload_activations(model, settings(tmp_path, verify="checksum")) as session:
        file = session._engine.transfer.tier.files[0]

        def flip():
            tape = session._engine.prefetch.tape
            slots = [slot for found in tape.records if (slot := found().slot) is not None and slot.image.middle_bytes]
            slot = chance.choice(slots)
            at = slot.pieces[0].offset + chance.randrange(slot.image.middle_bytes)
            byte = os.pread(file._buffered_fd, 1, at)
            os.pwrite(file._buffered_fd, bytes([byte[0] ^ 1 << chance.randrange(8)]), at)
            os.fsync(file._buffered_fd)

        for _ in range(40):
            message = failed_step(model, session, flip)
            assert re.search(r"no weight was changed.*checksums differ.*do not trust", message)
        assert_same(expected, step(model, session))


def test_a_directory_that_is_removed_meanwhile_changes_nothing(tmp_path, expected):
    directory = tmp_path / "scratch"
    directory.mkdir()
    model = tiny_model("gpt2")
    with offload_activations(model, settings(directory)) as session:
        assert_same(expected, step(model, session))
        shutil.rmtree(directory)
        assert_same(expected, step(model, session))
        assert session.stats.total.refused_bytes == 0


# -- real file systems -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path):
    """``mount(*arguments)`` mounts something at a fresh directory and returns it."""
    points = []

    def mount(*arguments):
        point = tmp_path / f"mount{len(points)}"
        point.mkdir()
        done = subprocess.run(["mount", *arguments, str(point)], capture_output=True, text=True, timeout=60)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        points.append(point)
        return point

    if os.geteuid():
        pytest.skip("only root can mount a file system")
    yield mount
    for point in points:
        subprocess.run(["umount", str(point)], check=True, timeout=60)


@pytest.fixture
def ext4(mount, tmp_path):
    """A file system of 32 MiB on a loop device."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("this machine has no mkfs.ext4")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, timeout=60)
    return mount("-o", "loop", str(image))


def fill(directory, leave_bytes):
    info = os.statvfs(directory)
    with (directory / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, info.f_bavail * info.f_frsize - leave_bytes)


def test_a_disk_that_fills_up_and_empties_again_leaves_steps_right(ext4, expected):
    model = tiny_model("gpt2")
    fill(ext4, 64 << 10)
    with offload_activations(model, settings(ext4)) as session:
        assert_same(expected, step(model, session))
        assert session.stats.total.refused_bytes > 0
        session.end_step()
        (ext4 / "filler").unlink()
        assert_same(expected, step(model, session))
        assert session.stats.step.refused_bytes == 0, "the room is used as soon as it is there"
        assert_nothing_left(session)


def test_a_file_system_that_turns_read_only_leaves_steps_right_or_says_so(ext4, expected, caplog):
    model = tiny_model("gpt2")
    before = weights(model)
    with offload_activations(model, settings(ext4)) as session:
        assert_same(expected, step(model, session))

        def turn_read_only():
            # What the kernel does to a drive with errors.
            subprocess.run(["mount", "-o", "remount,abort", str(ext4)], check=True, timeout=60)

        # Direct reads still work, so all is well; should they fail one day, it must be said.
        found, problem = None, ""
        try:
            found = step(model, session, turn_read_only)
        except OffloadError as error:
            problem = str(error)
        if found is not None:
            assert_same(expected, found)
        assert (found is None) == ("no weight was changed" in problem)
        assert_same(before, weights(model))
        assert_nothing_left(session)
        caplog.clear()
        assert_same(expected, step(model, session))  # nothing is written any more: everything stays in memory
        assert session.stats.step.refused_bytes > 0
        assert_nothing_left(session)
    assert "refused" in caplog.text


# -- a real run ------------------------------------------------------------------------------------------------------------


def flip_bits(monkeypatch):
    real = disk_io.read_once

    def read(descriptor, into, offset):
        count = real(descriptor, into, offset)
        into[0] ^= 1
        return count

    monkeypatch.setattr(disk_io, "read_once", read)


def trains_on_a_drive(tmp_path, *callbacks, **others):
    return trainer_in(tmp_path / "ours", True, callbacks, offload_optimizer="none", **others)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Weights after three steps of five, and after all."""
    found = {}
    note = AfterStep(3, lambda _: found.update({3: weights(run.model)}))
    run = trainer_in(tmp_path_factory.mktemp("plain"), False, [note])
    run.train()
    return found | {5: weights(run.model)}


@pytest.mark.parametrize("fault", ["error", "hang", "flipped bits"])
def test_a_run_on_a_broken_drive_ends_and_resumes_from_its_last_checkpoint(tmp_path, monkeypatch, undisturbed, fault):
    verify = "checksum" if fault == "flipped bits" else "off"
    with monkeypatch.context() as patch:
        hangs = []

        def break_drive(_):
            if fault == "error":
                Faults(patch, "read_once", errno.EIO, ALL)
            elif fault == "hang":
                hangs.append(Hang(patch, "read_once"))
            else:
                flip_bits(patch)

        broken = trains_on_a_drive(tmp_path, AfterStep(3, break_drive), offload_verify=verify)
        said = {"error": "Input/output error", "hang": "so the drive hangs", "flipped bits": "checksums differ"}[fault]
        with pytest.raises(OffloadError, match=rf"could not be read back.*no weight was changed.*{said}"):
            broken.train()
        for hang in hangs:
            hang.end()
    assert broken.state.global_step == 3
    assert_same(undisturbed[3], weights(broken.model))
    found = trains_on_a_drive(tmp_path, offload_verify=verify)
    found.train(resume_from_checkpoint=True)
    assert found.state.global_step == 5
    assert_same(undisturbed[5], weights(found.model))
    assert list((tmp_path / "tier").iterdir()) == []


def test_a_backward_that_updates_weights_itself_says_to_load_the_last_checkpoint(tmp_path, monkeypatch):
    mode = {
        "memory_mode": "galore",
        "memory_mode_kwargs": {"rank": 4, "update_in_backward": True},
        "max_grad_norm": 0.0,
    }
    expected = trainer_in(tmp_path / "plain", False, **mode)
    expected.train()
    before = {}
    with monkeypatch.context() as patch:
        count = calls_of_a_step(tmp_path, "read_once")

        def break_drive(_):
            before.update(weights(broken.model))
            Faults(patch, "read_once", errno.EIO, range(count // 2, 1 << 30))

        broken = trains_on_a_drive(tmp_path, AfterStep(3, break_drive), **mode)
        with pytest.raises(OffloadError, match="unless backward itself updates weights: then load the last checkpoint"):
            broken.train()
    with pytest.raises(AssertionError):
        assert_same(before, weights(broken.model))
    found = trains_on_a_drive(tmp_path, **mode)
    found.train(resume_from_checkpoint=True)
    assert_same(weights(expected.model), weights(found.model))
