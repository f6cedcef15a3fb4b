"""What goes wrong in a training, and what is special about it: memory falls, errors leave nothing, and no bit changes."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, OffloadConfigError, attach
from tests.accelerator.on_device.training import STEPS, TIERS, Case, batch, build, differences, train, train_offloaded

pytestmark = pytest.mark.usefixtures("nothing_stays_behind")


@pytest.mark.parametrize("tier", TIERS)
def test_the_default_device_may_be_the_accelerator(late, tier):
    """What the engine keeps on the host has to be there whatever the default is."""
    plain, _ = train(Case(), build(Case()))
    torch.set_default_device("late")
    try:
        found, _ = train_offloaded(Case(), **TIERS[tier])
    finally:
        torch.set_default_device(None)
    assert differences(plain, found) == []


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_an_error_leaves_nothing_behind(late, tier, where):
    model = build(Case())
    session = attach(model, OffloadConfig(min_bytes=0, **TIERS[tier]))
    block = model.transformer.h[1]

    def fail(*_: Any) -> None:
        raise ValueError("not today")

    hook = block.register_forward_hook(fail) if where == "forward" else block.register_full_backward_hook(fail)
    for seed in range(8):
        late.reseed(seed)
        with pytest.raises(ValueError, match="not today"):
            model(**batch(Case(), 0)).loss.backward()
    hook.remove()
    model.zero_grad()
    gc.collect()
    loss = model(**batch(Case(), 0)).loss
    loss.backward()
    assert session._engine.resident_bytes() == 0
    session.detach()


@pytest.mark.parametrize("goes_last", ["model", "graph"])
def test_what_is_left_is_closed_by_a_thread_that_has_the_device(late, goes_last):
    """The training's own thread has another one."""
    case, before = Case(device="late:1"), late.pinned_bytes()
    model = build(case)
    session = attach(model, OffloadConfig(min_bytes=0, tier="ram"))
    loss = model(**batch(case, 0)).loss
    assert late.pinned_bytes() > before
    if goes_last == "graph":
        session.detach()
        closing = next(thread for thread in threading.enumerate() if thread.name == "hf_offload-outlive")
        del loss
    else:
        closing = session._watch._thread
        del loss, model
        gc.collect()
    closing.join(60)
    assert not closing.is_alive()
    assert late.pinned_bytes() == before
    assert torch.accelerator.current_device_index() == 0


def test_two_models_at_once(late):
    cases = [Case(name="gpt2"), Case(name="llama", device="late:1")]
    plain = [train(case, build(case))[0] for case in cases]
    for seed in range(2):
        late.reseed(seed)
        models = [build(case) for case in cases]
        sessions = [attach(model, OffloadConfig(min_bytes=0, tier="ssd")) for model in models]
        found = [
            train(case, model, session.end_step)[0]
            for case, model, session in zip(cases, models, sessions, strict=True)
        ]
        for session in sessions:
            session.detach()
        assert [differences(*pair) for pair in zip(plain, found, strict=True)] == [[], []]
        del models, sessions, session, found
        gc.collect()


def _peak(late: Any, tier: str | None, pace: float) -> int:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(16)]
    model = nn.Sequential(*blocks).to("late:0")
    x = torch.randn(512, 64, device="late:0")
    session = None if tier is None else attach(model, OffloadConfig(min_bytes=0, tier=tier))
    late.reseed(0, pace)
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        model(x).square().sum().backward()
        peak = torch.accelerator.max_memory_allocated() - before
    if session is not None:
        session.detach()
    return peak


@pytest.mark.parametrize("pace", [0.0, 1.0])
@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_the_peak_falls_however_late_copies_are(late, tier, pace, monkeypatch):
    monkeypatch.setattr("hf_offload.plan.rules.WRITE_BEHIND_BYTES", 1 << 20)  # the model is small, too
    assert _peak(late, tier, pace) < 0.4 * _peak(late, None, pace)


@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_no_memory_to_read_ahead_narrows_the_window(late, tier):
    """Backward goes on with what it needs, and does not try as much again each time, which would flush the cache."""
    case = Case(name="llama")
    plain, _ = train(case, build(case))
    model = build(case)
    session = attach(model, OffloadConfig(min_bytes=0, read_ahead_bytes=1 << 20, tier=tier))
    transfer = session._engine.transfer
    tried = 0
    begin = transfer.start_load

    def start_load(record: Any, urgent: bool = False) -> None:
        nonlocal tried
        if not urgent:
            tried += 1
            late.fail_allocation(0)
        begin(record, urgent)

    transfer.start_load = start_load
    found, _ = train(case, model, session.end_step)
    records = session.stats.total.loaded_bytes
    session.detach()
    assert differences(plain, found) == []
    assert records > 0
    assert 0 < tried <= STEPS * 21  # halving a MiB comes to an end


def test_nothing_is_moved_while_a_stream_captures(late):
    model = build(Case())
    session = attach(model, OffloadConfig(min_bytes=0, tier="ram"))
    late.set_capturing(True)
    try:
        model(**batch(Case(), 0)).loss.backward()
    finally:
        late.set_capturing(False)
    assert session.stats.step.offloaded_bytes == 0
    assert session.stats.step.kept_bytes > 0
    session.detach()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("where", ["whole", "block"])
def test_compile_modes_with_graphs_are_refused_by_name(late, mode, where):
    model = build(Case())
    (model if where == "whole" else model.transformer.h[0]).compile(mode=mode)
    with pytest.raises(OffloadConfigError, match=r"reduce-overhead.*max-autotune-no-cudagraphs"):
        attach(model, OffloadConfig(min_bytes=0, tier="ram"))
    model = build(Case())
    model.compile(mode="max-autotune-no-cudagraphs")
    attach(model, OffloadConfig(min_bytes=0, tier="ram")).detach()
