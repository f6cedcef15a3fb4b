"""Runs that are killed, terminated, interrupted, or that run out of memory."""

import contextlib
import gc
import itertools
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from hf_offload import OffloadConfig, attach
from hf_offload.engine.device import CpuDevice
from tests.faults.trainers import trainer_in
from tests.helpers.tables import rows
from tests.helpers.tiny_models import gradients, tiny_batch, tiny_model, weights

TIMEOUT_S = 250


def kills(count):
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.killed", str(count)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{count} runs killed in \d+ s, 0 problems$", done.stdout, re.MULTILINE)


def test_runs_that_are_killed_leave_nothing_and_the_next_one_starts():
    kills(5)


# -- signals that a training hears -----------------------------------------------------------------------------------------


class _Signal(TrainerCallback):
    """Sends this process a signal in the third step, after its forward and backward."""

    def __init__(self, number):
        self._number = number
        self.trainer = None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 2:
            manager = next(
                (
                    found
                    for each in self.trainer.callback_handler.callbacks
                    if (found := getattr(each, "jit_manager", None))
                ),
                None,
            )
            if manager is not None:
                manager.kill_wait = 0
            signal.raise_signal(self._number)
            while manager is not None and not manager.is_checkpoint_requested:
                time.sleep(0.01)


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def saved(folder):
    """What a training has saved: the names of all files, and the weights."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return names, {name: (folder / name).read_bytes() for name in names if name.endswith("model.safetensors")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_stopped_training_saves_what_it_would_save_without_offloading(tmp_path, number):
    whole = trainer_in(tmp_path / "whole", False)
    whole.train()
    threads, fds = set(threading.enumerate()), open_files()
    results = []
    for offloaded in (False, True):
        # Without this the Trainer does nothing about SIGTERM, and the process ends.
        others = {"enable_jit_checkpoint": True} if number == signal.SIGTERM else {}
        sender = _Signal(number)
        sender.trainer = trainer = trainer_in(tmp_path / f"stopped{offloaded}", offloaded, [sender], **others)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        results.append((trainer.state.global_step, *saved(tmp_path / f"stopped{offloaded}")))
        sender.trainer = None
        del trainer  # Ctrl-C has ended it without a word to its callbacks
    (plain_step, plain_names, plain_weights), (step, names, weights_saved) = results
    assert (step, names) == (plain_step, plain_names)
    assert weights_saved == plain_weights
    assert any(name.startswith("checkpoint-2/") for name in names)
    again = trainer_in(tmp_path / "stoppedTrue", True)
    again.train(resume_from_checkpoint=True)
    before, after = weights(whole.model), weights(again.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert list((tmp_path / "tier").iterdir()) == []
    del again
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    assert set(threading.enumerate()) <= threads
    assert open_files() <= fds


# -- out of memory ---------------------------------------------------------------------------------------------------------


class _OutOfMemory(torch.autograd.Function):
    """An operation with no memory for its result, or for its gradient."""

    @staticmethod
    def forward(ctx, hidden, error, direction):
        if direction == "forward":
            raise error("Tried to allocate more than there is")
        ctx.error = error
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error("Tried to allocate more than there is")


NO_MEMORY = list(itertools.product((torch.OutOfMemoryError, RuntimeError, MemoryError), ("forward", "backward")))
QUICK = [(torch.OutOfMemoryError, "forward"), (torch.OutOfMemoryError, "backward"), (MemoryError, "backward")]


@pytest.mark.parametrize(("error", "direction"), rows(NO_MEMORY, quick=QUICK))
def test_out_of_memory_leaves_a_usable_session_and_nothing_of_its_step(tmp_path, error, direction):
    model = tiny_model("gpt2")

    def step():
        model.zero_grad()
        torch.manual_seed(1)
        model(**tiny_batch("gpt2")).loss.backward()
        return gradients(model)

    expected = step()
    session = attach(model, OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0, read_ahead_bytes=1))
    transfer = session._engine.transfer
    for _ in range(3):
        with no_memory(model.transformer.h[1].mlp, error, direction), pytest.raises(error, match="more than there is"):
            step()
        gc.collect()
        torch.ones(1, requires_grad=True).sum().backward()
        deadline = time.monotonic() + 60
        left = None
        while left != (0, 0, 0) and time.monotonic() < deadline:  # room is given back when the last transfer has ended
            time.sleep(0.01)
            transfer.reap()
            left = (transfer.live_records, transfer.ledger.resident_bytes, transfer.tier.stats.used_bytes)
        assert left == (0, 0, 0)
        found = step()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    session.detach()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@contextlib.contextmanager
def no_memory(module: nn.Module, error, direction):
    handle = module.register_forward_hook(lambda module, args, output: _OutOfMemory.apply(output, error, direction))
    yield
    handle.remove()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_no_memory_to_read_back_into_ends_the_step_and_the_next_one_is_right(tmp_path, monkeypatch, error):
    model = tiny_model("gpt2")
    config = OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0, read_ahead_bytes="64KiB")
    session = attach(model, config)
    transfer = session._engine.transfer

    def step(before_backward=lambda: None):
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(**tiny_batch("gpt2")).loss
        transfer._wait_for_writes(0)
        before_backward()
        loss.backward()
        return gradients(model)

    expected = step()
    real, left = CpuDevice.allocate, []

    def allocate(device, nbytes, phase):
        if not left:
            raise error("Tried to allocate more than there is")
        left.pop()
        return real(device, nbytes, phase)

    for count in (0, 1, 7):
        with monkeypatch.context() as patch, pytest.raises(error, match="more than there is"):
            step(
                lambda patch=patch, count=count: (
                    left.extend(range(count)),
                    patch.setattr(CpuDevice, "allocate", allocate),
                )
            )
        left.clear()
        found = step()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    gc.collect()
    transfer.reap()
    session.detach()
