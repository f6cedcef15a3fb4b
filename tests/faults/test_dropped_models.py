"""Models that are dropped while offloading is attached: nothing of their sessions stays, and nothing they gave is wrong."""

import contextlib
import gc
import os
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from hf_offload import OffloadConfig, attach
from hf_offload.integrations.summary import summary_lines
from hf_offload.session import attached_session
from hf_offload.settings.sampling import SampledLinearConfig
from tests.helpers.loaded_processes import run_python
from tests.helpers.package_threads import OurThreads, open_files
from tests.helpers.tiny_models import gradients, tiny_batch, tiny_model

TIMEOUT_S = 60
TIERS = ["ram", "ssd", "auto"]


@pytest.fixture(autouse=True)
def known_machine(machine_with_drive):
    machine_with_drive(1e9)


def settings(tier, directory, **others):
    where = {} if tier == "ram" else {"directory": directory}
    budget = {"memory_budget": "1GiB"} if tier == "auto" else {"read_ahead_bytes": 1}
    return OffloadConfig(tier=tier, min_bytes=0, **where, **budget, **others)


class Before:
    """What there is now of what a session takes: threads of ours, descriptors, modes and hooks of this thread."""

    def __init__(self):
        gc.collect()
        self._descriptors = set(Path("/proc/self/fd").iterdir())
        self._backward = torch.autograd._engine_run_backward
        self.threads = OurThreads()

    def assert_all_is_as_it_was(self):
        gc.collect()
        self.threads.join(TIMEOUT_S)
        assert set(Path("/proc/self/fd").iterdir()) <= self._descriptors
        assert _get_current_dispatch_mode() is None
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        torch.ones(1, requires_grad=True).sum().backward()  # the next one of the process
        assert torch.autograd._engine_run_backward is self._backward


def forward(model):
    torch.manual_seed(1)
    return model(**tiny_batch("gpt2")).loss


def step(model, optimizer):
    forward(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(("tier", "steps"), [("ram", 1), ("ssd", 0), ("ssd", 3), ("auto", 1), ("auto", 3)])
def test_nothing_stays_of_a_session_whose_model_was_dropped(tmp_path, tier, steps):
    before = Before()
    model = tiny_model("gpt2")
    optimizer = adam(model)
    attach(model, settings(tier, tmp_path))
    for _ in range(steps):
        step(model, optimizer)
    assert tier == "ram" or open_files(tmp_path)
    del model, optimizer
    before.assert_all_is_as_it_was()
    assert open_files(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tier", ["ssd", "auto"])
def test_a_session_that_somebody_holds_keeps_its_counters_and_nothing_else(tmp_path, tier):
    """Of everything that can be applied to a model, none holds it."""
    before = Before()
    model = tiny_model("gpt2")
    optimizer = adam(model)
    everything = {
        "tiled_loss": "on", "tiled_mlp": ("transformer.h.0.mlp",), "sampled_linear": SampledLinearConfig(ratio=0.5),
        "recompute_elementwise": ("exact", "dropout"), "keep_last_count": 0,
    }  # fmt: skip
    session = attach(model, settings(tier, tmp_path, **everything))
    for _ in range(4):
        step(model, optimizer)
        session.end_step()
    counted = session.stats.total.offloaded_bytes
    assert (session.active, session.orphaned) == (True, False)
    gone = weakref.ref(model)
    del model, optimizer
    before.assert_all_is_as_it_was()
    assert gone() is None
    assert (session.active, session.orphaned) == (False, True)
    assert session.stats.ended_steps == 4
    assert session.stats.total.offloaded_bytes == counted > 0
    session.detach()
    session.detach()
    assert (session.active, session.orphaned) == (False, False)


@pytest.mark.parametrize(("tier", "recompute"), [("ram", True), ("ssd", False), ("auto", False), ("auto", True)])
def test_a_graph_that_outlives_its_model_gives_the_right_gradients(tmp_path, tier, recompute):
    def built():
        model = tiny_model("gpt2").train()
        if recompute:
            model.activation_checkpointing_enable()
        return model

    plain = built()
    forward(plain).backward()
    expected = gradients(plain)
    before = Before()
    model = built()
    session = attach(model, settings(tier, tmp_path))
    loss = forward(model)
    transfer = session._engine.transfer
    transfer._wait_for_writes(0)
    parameters = dict(model.named_parameters())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    session._wait_if_gone()
    assert session.orphaned
    assert transfer.live_records > 0
    assert tier == "ram" or open_files(tmp_path), "the graph needs what is in there"
    loss.backward()
    assert session.stats.total.read_bytes > 0 or tier == "auto"
    assert expected.keys() <= parameters.keys()
    assert all(torch.equal(expected[name], parameters[name].grad) for name in expected)
    del loss, transfer, parameters, session
    torch.ones(1, requires_grad=True).sum().backward()  # autograd itself keeps the nodes that were next in line
    before.assert_all_is_as_it_was()
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("how_far", ["forward", "backward"])
def test_a_model_that_goes_in_the_middle_of_a_measured_step_takes_the_measuring_along(tmp_path, how_far):
    before = Before()
    model = tiny_model("gpt2")
    attach(model, settings("auto", tmp_path))
    loss = forward(model)
    if how_far == "backward":
        loss.backward()
    assert _get_current_dispatch_mode() is not None
    del model, loss
    before.assert_all_is_as_it_was()


class _Other(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_what_measures_under_another_mode_counts_no_more_and_leaves_at_the_next_step(tmp_path):
    model = tiny_model("gpt2")
    session = attach(model, settings("auto", tmp_path))
    forward(model)
    meter = _get_current_dispatch_mode()
    with _Other():
        del model
        gc.collect()
        assert _get_current_dispatch_mode() is not meter
        assert session.model is None
    assert _get_current_dispatch_mode() is meter
    live = meter.peak_live_bytes
    other = torch.nn.Linear(1000, 1000)
    optimizer = adam(other)
    other(torch.ones(1000, 1000)).sum().backward()
    assert meter.peak_live_bytes == live
    optimizer.step()
    assert _get_current_dispatch_mode() is None
    session.detach()


@pytest.mark.parametrize("tier", TIERS)
def test_a_forward_that_was_interrupted_leaves_no_hooks_when_its_model_goes(tmp_path, tier):
    before = Before()
    model = tiny_model("gpt2")
    attach(model, settings(tier, tmp_path))

    def stumble(module, args):
        raise KeyboardInterrupt

    model.lm_head.register_forward_pre_hook(stumble)
    with contextlib.suppress(KeyboardInterrupt):
        forward(model)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    del model
    before.assert_all_is_as_it_was()


@pytest.mark.parametrize("lock", ["transfer.lock", "transfer.tier._lock"])
def test_the_garbage_collector_may_come_while_a_lock_is_held(tmp_path, lock):
    before = Before()
    model = tiny_model("gpt2")
    session = attach(model, settings("ssd", tmp_path))
    forward(model).backward()
    held = session._engine
    for name in lock.split("."):
        held = getattr(held, name)
    cycle = [model]
    cycle.append(cycle)
    gone = weakref.ref(model)
    del model, cycle

    def collect():
        with held:
            gc.collect()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(TIMEOUT_S)
    assert not collecting.is_alive()
    assert gone() is None
    session.detach()
    before.assert_all_is_as_it_was()


def test_detach_and_the_models_end_do_not_meet(tmp_path):
    """Whoever comes first, each thing is given back once, and detach returns when it is."""
    before = Before()
    for _ in range(20):
        model = torch.nn.Linear(8, 8)
        session = attach(model, settings("ssd", tmp_path))
        dropping = threading.Thread(target=[model].clear)
        del model
        dropping.start()
        session.detach()
        assert before.threads.running() == []
        dropping.join()
    before.assert_all_is_as_it_was()


def test_a_detached_model_is_not_watched(tmp_path):
    before = Before()
    model = tiny_model("gpt2")
    for tier in TIERS:
        attach(model, settings(tier, tmp_path)).detach()
        before.assert_all_is_as_it_was()
    assert attached_session(model) is None


# -- the summary of a launched script --------------------------------------------------------------------------------------

SCRIPT = """
import gc, os, sys, threading
from pathlib import Path
import torch
from accelerate import Accelerator
from tests.helpers.tiny_models import tiny_batch, tiny_model

def train():
    accelerator = Accelerator()
    model = tiny_model("gpt2")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for seed in range(4):
        accelerator.backward(model(**tiny_batch("gpt2", seed=seed)).loss)
        optimizer.step()
        optimizer.zero_grad()

train()
gc.collect()
for thread in threading.enumerate():
    if thread.name.startswith("hf_offload"):
        thread.join(60)
print([thread.name for thread in threading.enumerate() if thread.name.startswith("hf_offload")])
print([str(link) for link in Path("/proc/self/fd").iterdir() if link.exists() and sys.argv[1] in os.readlink(link)])
"""


def test_a_launched_script_whose_model_goes_before_it_ends_still_has_its_summary(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    tier = tmp_path / "tier"
    tier.mkdir()
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HOME": str(tmp_path / "home"),
        "HF_OFFLOAD_TIER": "ssd", "HF_OFFLOAD_DIRECTORY": str(tier), "HF_OFFLOAD_MIN_BYTES": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "hf_offload", "launch", "train.py", str(tier)]
    done = run_python(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n[]\n"
    assert done.stderr.count("of activations moved a step") == 1
    assert "Nothing was offloaded" not in done.stderr
    assert "Exception" not in done.stderr
    assert list(tier.iterdir()) == []


def test_the_summary_counts_the_last_step_of_a_model_that_has_gone(tmp_path):
    """The accelerator's steps end when the next one begins, and after the last one none does."""
    moved = []
    for steps in (1, 4):
        model = tiny_model("gpt2")
        session = attach(model, settings("ssd", tmp_path))
        for _ in range(steps):
            forward(model).backward()
            session.optimizer_stepped()
        del model
        gc.collect()
        session.finish()
        assert session.stats.ended_steps == steps
        moved.append(summary_lines(session)[0].partition(" of activations")[0])
        session.detach()
    assert moved[0] == moved[1]
