"""Drives that fail, tiers that are full and memory that is not to be had, while copies are on their way: each step is right
to the bit, or ends in one clear error, and the next one is right. Whichever it was, nothing stays behind.
"""

import errno
import gc
import itertools
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, OffloadError, OffloadSession, attach
from hf_offload.errors import TierFullError
from tests.accelerator.on_device.training import Case, batch, build
from tests.faults.failing_calls import ALL, Faults
from tests.helpers.tiny_models import gradients
from tests.helpers.train import assert_same

pytestmark = pytest.mark.usefixtures("nothing_stays_behind")
CASE = Case()
DEVICE = torch.device(CASE.device)
SEED = 5


@pytest.fixture
def expected(late):
    """Gradients of a step without offloading."""
    return step(build(CASE))


@pytest.fixture
def small_chunks(monkeypatch):
    """Records of a few pages each go in chunks of one, through a ring that has room for some of them."""
    monkeypatch.setattr("hf_offload.plan.rules._CHUNK_BYTES", 4096)
    monkeypatch.setattr("hf_offload.plan.rules.RING_BYTES", 32 << 10)


def step(
    model: nn.Module, session: OffloadSession | None = None, before_backward: Callable[[], None] = lambda: None
) -> dict[str, torch.Tensor]:
    """Gradients of one step with dropout. Everything has left memory before backward asks for it."""
    torch.manual_seed(SEED)
    loss = model(**batch(CASE, 0)).loss
    if session is not None:
        session._engine.transfer.settle()
    before_backward()
    loss.backward()
    return {name: gradient.cpu() for name, gradient in gradients(model).items()}


class Run:
    """A model whose steps are looked at: what they compute, and what is there afterwards that was not there before."""

    def __init__(self, late: Any, expected: dict[str, torch.Tensor], session: OffloadSession, model: nn.Module):
        self.session = session
        self._late = late
        self._expected = expected
        self._model = model
        self._allocated = torch.accelerator.memory_allocated()
        self._pinned = 1 << 40
        assert self.step() == ""
        self._pinned = late.pinned_bytes()

    def step(self, before_backward: Callable[[], None] = lambda: None, fail_allocation: int = -1) -> str:
        """What the step's error says; nothing if its gradients are right. What it held goes without the collector."""
        said = ""
        self._late.fail_allocation(fail_allocation)
        gc.disable()
        try:
            try:
                assert_same(self._expected, step(self._model, self.session, before_backward))
            except (OffloadError, torch.OutOfMemoryError) as error:
                said = f"{type(error.__cause__ or error).__name__}: {error}"
            self._late.fail_allocation(-1)
            self._model.zero_grad()
            # Autograd keeps the nodes that were next in line until it goes backward again.
            torch.ones(1, device=DEVICE, requires_grad=True).sum().backward()
            assert self._left() == (0, 0, 0, 0, 0, 0)
            assert self._late.pinned_bytes() <= self._pinned
        finally:
            gc.enable()
        self.session.end_step()
        return said

    def _left(self) -> tuple[int, ...]:
        """Records, slots and bytes, of the engine and of the device. Workers may hold the last of them an instant longer."""
        transfer = self.session._engine.transfer
        deadline = time.monotonic() + 30
        while True:
            transfer.settle()
            transfer.reap()
            left = (
                transfer.live_records,
                transfer.ledger.resident_bytes + transfer.ledger.own_bytes,
                transfer.tier.stats.used_bytes,
                transfer.mover._ring._used,
                torch.accelerator.memory_allocated() - self._allocated,
                self._tasks_waiting(),
            )
            if not any(left) or time.monotonic() > deadline:
                return left
            time.sleep(0.005)

    def _tasks_waiting(self) -> int:
        """Once all has been done that was asked for, nobody is there any more who asks for something."""
        torch.accelerator.synchronize()
        mover = self.session._engine.transfer.mover
        for pool in (mover._urgent_workers, mover._load_workers, mover._store_workers, mover._arrival_workers):
            done = threading.Event()
            pool.submit(done.set)
            assert done.wait(60)
        return int(self._late.tasks_waiting())


@contextmanager
def offloaded(late: Any, expected: dict[str, torch.Tensor], **settings: Any) -> Iterator[Run]:
    model = build(CASE)
    session = attach(model, OffloadConfig(**{"min_bytes": 0, "read_ahead_bytes": 1} | settings))
    try:
        yield Run(late, expected, session, model)
    finally:
        session.detach()


def calls_of_a_step(run: Run, monkeypatch: pytest.MonkeyPatch, side: str) -> int:
    with monkeypatch.context() as patch:
        counting = Faults(patch, side, 0, ())
        assert run.step() == ""
    return counting.calls


def which_calls(count: int) -> list[Any]:
    assert count > 30
    return [{0}, {1}, {count // 2}, {count - 1}, range(0, count, 2), ALL]


def test_whichever_write_fails_the_step_is_right(late, tmp_path, monkeypatch, expected):
    """The drive is full and has an error in turns."""
    with offloaded(late, expected, tier="ssd", directory=tmp_path) as run:
        for seed, which in enumerate(which_calls(calls_of_a_step(run, monkeypatch, "write_once"))):
            late.reseed(seed)
            with monkeypatch.context() as patch:
                faults = Faults(patch, "write_once", errno.EIO if seed % 2 else errno.ENOSPC, which)
                assert run.step() == ""
            assert faults.failed > 0
            assert run.session.stats.steps[-1].refused_bytes > 0
            assert run.step() == ""
            assert run.session.stats.steps[-1].refused_bytes == 0


def test_whichever_read_fails_the_step_is_right_or_ends(late, tmp_path, monkeypatch, expected):
    """What could not be read ahead is read again when it is needed."""
    message = rf"StorageError: Activations of .* no weight was changed.*Reading from {tmp_path}.*kernel's log"
    ended = set()
    with offloaded(late, expected, tier="ssd", directory=tmp_path, read_ahead_bytes=48 << 10) as run:
        for seed, which in enumerate(which_calls(calls_of_a_step(run, monkeypatch, "read_once"))):
            late.reseed(seed)
            with monkeypatch.context() as patch:
                faults = Faults(patch, "read_once", errno.EIO, which)
                said = run.step()
            assert faults.failed > 0
            assert re.search(message if said or which is ALL else "^$", said)
            ended.add(bool(said))
            assert run.step() == ""
    assert ended == {True, False}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("side", ["write_once", "read_once"])
def test_a_chunk_that_fails_takes_no_other_with_it(late, tmp_path, monkeypatch, expected, side):
    """Some chunks of a record are on the drive, and one is in memory, or nowhere."""
    with offloaded(late, expected, tier="ssd", directory=tmp_path) as run:
        count = calls_of_a_step(run, monkeypatch, side)
        for seed, which in enumerate([{1}, range(1, count, 3), ALL]):
            late.reseed(seed)
            with monkeypatch.context() as patch:
                faults = Faults(patch, side, errno.EIO, which)
                said = run.step()
            assert faults.failed > 0
            assert not said or (side == "read_once" and said.startswith("StorageError: Activations of "))
            assert run.step() == ""


@pytest.mark.parametrize("tier", ["ssd", "ram"])
def test_every_flipped_bit_is_found(late, tmp_path, expected, tier):
    """The bytes are changed where they are kept, behind the engine's back."""
    chance = random.Random(0)
    settings = {"directory": tmp_path} if tier == "ssd" else {}

    def flip_in_a_file(slot: Any) -> bool:
        if not slot.image.middle_bytes:
            return False
        file, at = run.session._engine.transfer.tier.files[0], slot.pieces[0].offset
        at += chance.randrange(slot.image.middle_bytes)
        data = bytearray(1)
        os.preadv(file._buffered_fd, [data], at)
        data[0] ^= 1 << chance.randrange(8)
        os.pwrite(file._buffered_fd, data, at)
        os.fsync(file._buffered_fd)
        return True

    def flip_in_ram(slot: Any) -> bool:
        slot.arena.data[slot.offset + chance.randrange(slot.nbytes)] ^= 1 << chance.randrange(8)
        return True

    def flip() -> None:
        found = [reference().slot for reference in run.session._engine.prefetch.tape.records]
        slots = [slot for slot in found if slot is not None]
        chance.shuffle(slots)
        assert any(map(flip_in_a_file if tier == "ssd" else flip_in_ram, slots))

    with offloaded(late, expected, tier=tier, verify="checksum", **settings) as run:
        for seed in range(3):
            late.reseed(seed)
            said = run.step(flip)
            assert re.search(r"^StorageError: .*no weight was changed.*checksums differ.*do not trust", said)
            assert run.step() == ""


@pytest.mark.parametrize(
    "settings",
    [{"tier": "ram", "ram_budget": 32 << 10}, {"tier": "ssd", "disk_budget": 32 << 10}],
    ids=["ram", "ssd"],
)
def test_a_tier_that_is_full_leaves_the_rest_where_it_is(late, tmp_path, expected, settings):
    if settings["tier"] == "ssd":
        settings = settings | {"directory": tmp_path}
    with offloaded(late, expected, **settings) as run:
        for seed in range(4):
            late.reseed(seed)
            assert run.step() == ""
            step_stats = run.session.stats.steps[-1]
            assert step_stats.refused_bytes > 0
            assert step_stats.written_bytes > 0


@pytest.mark.usefixtures("small_chunks")
def test_a_tier_that_is_full_in_the_midst_of_a_record_takes_none_of_it(late, tmp_path, monkeypatch, expected):
    """The room that was there for the whole of it may be another's when its chunks are asked for."""
    with offloaded(late, expected, tier="ssd", directory=tmp_path) as run:
        tier, chunks = run.session._engine.transfer.tier, itertools.count(1)
        real = tier.reserve

        def reserve(nbytes: int, place: str | None = None) -> Any:
            if nbytes == 4096 and next(chunks) % 5 == 0:
                raise TierFullError("no room for this chunk")
            return real(nbytes, place)

        monkeypatch.setattr(tier, "reserve", reserve)
        for seed in range(4):
            late.reseed(seed)
            assert run.step() == ""
            assert run.session.stats.steps[-1].refused_bytes > 0
            assert run.session.stats.steps[-1].written_bytes > 0


def counted(what: str) -> int:
    return int(torch.accelerator.memory_stats()[what])


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.full), 17])
@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_whichever_allocation_fails_no_bit_is_wrong(late, tmp_path, expected, tier, every):
    """Reading ahead can do without the memory, and halves its window; whatever else lacks it says so, as it always does."""
    settings = {"directory": tmp_path} if tier == "ssd" else {}
    ended = went_on = 0
    with offloaded(late, expected, tier=tier, read_ahead_bytes=48 << 10, **settings) as run:
        before = counted("allocation.all.allocated")
        assert run.step() == ""
        count = counted("allocation.all.allocated") - before
        for number in range(0, count, every):
            late.reseed(number)
            failed = counted("num_ooms")
            said = run.step(fail_allocation=number)
            if counted("num_ooms") == failed:
                assert said == ""  # how much is read ahead, and when, depends on what has arrived: this step had fewer
                continue
            assert re.match(r"$|OutOfMemoryError: Tried to allocate", said), f"allocation {number} of {count}: {said}"
            if said:
                ended += 1
            else:
                went_on += 1
                assert run.session._engine.prefetch.tape.narrowed_bytes == 24 << 10
            assert run.step() == "", f"after allocation {number} of {count}"
    assert ended > 0
    assert went_on > 0
    assert ended + went_on >= 0.9 * count / every
