"""Losses, gradients and weights are the same bits on an accelerator, whatever its streams do first, and memory falls."""

import contextlib
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_offload import OffloadConfig, OffloadConfigError, attach
from tests.tiny_models import NAMES, gradients, tiny_batch, tiny_model, weights

STEPS = 3
TIERS: dict[str, dict[str, Any]] = {
    "ram": {"tier": "ram"},
    "ssd": {"tier": "ssd"},
    "spill": {"tier": "ssd", "ram_budget": 64 << 10},
    "auto": {"tier": "auto", "memory_budget": 1 << 30},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    name: str = "gpt2"
    device: str = "late:0"
    accumulation: int = 1
    checkpointing: str | None = None
    retain_graph: bool = False
    own_stream: bool = False


def build(case: Case) -> nn.Module:
    if case.name == "whisper":
        torch.manual_seed(0)
        config = transformers.WhisperConfig(
            vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=24,
            max_target_positions=24, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
        )  # fmt: skip
        model: nn.Module = transformers.WhisperForConditionalGeneration(config)
    else:
        model = tiny_model(case.name)
    if case.checkpointing is not None:
        # The older name is a deprecated alias where the newer one exists.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": case.checkpointing == "reentrant"})
    return model.to(case.device).train()


def batch(case: Case, seed: int) -> dict[str, torch.Tensor]:
    if case.name == "whisper":
        generator = torch.Generator().manual_seed(seed)
        values = {
            "input_features": torch.randn(2, 8, 48, generator=generator),
            "labels": torch.randint(2, 96, (2, 12), generator=generator),
        }
    else:
        values = tiny_batch(case.name, seed=seed)
    return {name: value.to(case.device) for name, value in values.items()}


def train(
    case: Case, model: nn.Module, end_step: Callable[[], None] = lambda: None
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """A few optimizer steps: every loss, gradient and weight, and the bytes allocated after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trace: dict[str, torch.Tensor] = {}
    allocated = []
    stream = torch.Stream(device=case.device) if case.own_stream else None
    torch.manual_seed(7)
    for step in range(STEPS):
        with stream or contextlib.nullcontext():
            for micro in range(case.accumulation):
                loss = model(**batch(case, 10 * step + micro)).loss
                trace[f"step {step}: loss {micro}"] = loss.detach().cpu()
                (loss / case.accumulation).backward(retain_graph=case.retain_graph)
                if case.retain_graph:
                    (loss / case.accumulation).backward()
                del loss
            trace |= {f"step {step}: gradient of {k}": v.cpu() for k, v in gradients(model).items()}
            optimizer.step()
            optimizer.zero_grad()
            trace |= {f"step {step}: weight {k}": v.cpu() for k, v in weights(model).items()}
            end_step()
        gc.collect()
        allocated.append(torch.accelerator.memory_allocated(case.device))
    return trace, allocated


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    assert expected.keys() == found.keys()
    return [what for what, value in expected.items() if not torch.equal(value, found[what])]


def train_offloaded(case: Case, **settings: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    model = build(case)
    session = attach(model, OffloadConfig(min_offload_bytes=0, **settings))

    def end_step() -> None:
        session.end_step()
        # A thread holds what was loaded until its copy has ended: it comes to this after all of those.
        done = threading.Event()
        session._engine.transfer._mover._arrival_workers.submit(done.set)
        assert done.wait(20)

    found = train(case, model, end_step)
    assert session.stats.total.refused_bytes == 0
    session.detach()
    return found


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    gc.collect()
    before = [torch.accelerator.memory_allocated(index) for index in range(2)]
    yield
    for _ in range(100):  # a thread closes what a session leaves
        gc.collect()
        if [torch.accelerator.memory_allocated(index) for index in range(2)] == before:
            return
        time.sleep(0.02)
    assert [torch.accelerator.memory_allocated(index) for index in range(2)] == before


def assert_exact(late: Any, case: Case, seeds: range = range(2), **settings: Any) -> None:
    plain, expected = train(case, build(case))
    gc.collect()
    for seed in seeds:
        late.reseed(seed)
        found, allocated = train_offloaded(case, **settings)
        assert differences(plain, found) == [], f"seed {seed}"
        assert allocated == expected, f"seed {seed}"


# Behind a spill tier are both others; each of them alone, and whatever auto makes of them, takes its time.
EVERY_TIER = [pytest.param(tier, marks=() if tier == "spill" else pytest.mark.full) for tier in TIERS]


@pytest.mark.parametrize("tier", TIERS)
def test_tiers(late, tier):
    assert_exact(late, Case(), **TIERS[tier])


@pytest.mark.parametrize("tier", EVERY_TIER)
@pytest.mark.parametrize("name", [*(name for name in NAMES if name != "gpt2"), "whisper"])
def test_models(late, name, tier):
    assert_exact(late, Case(name=name), **TIERS[tier])


@pytest.mark.parametrize("tier", EVERY_TIER)
@pytest.mark.parametrize(
    "case",
    [
        Case(accumulation=3),
        Case(checkpointing="reentrant"),
        Case(checkpointing="non-reentrant"),
        Case(retain_graph=True),
        Case(own_stream=True),
        Case(device="late:1"),
    ],
    ids=["accumulation", "reentrant", "non-reentrant", "retain_graph", "own_stream", "second_device"],
)
def test_ways_to_train(late, case, tier):
    assert_exact(late, case, **TIERS[tier])


@pytest.mark.parametrize("tier", ["ssd", "spill"])
def test_what_goes_in_chunks(late, tier, monkeypatch):
    """Records of a few pages each, in chunks of one, through a ring that has room for some of them."""
    monkeypatch.setattr("hf_offload.engine.movers.StagedMover._CHUNK_BYTES", 4096)
    monkeypatch.setattr("hf_offload.engine.hooks._RING_BYTES", 32 << 10)
    assert_exact(late, Case(), range(4), **TIERS[tier])


@pytest.mark.full
@pytest.mark.parametrize("tier", ["ram", "ssd", "spill"])
def test_two_thousand_seeds(late, tier):
    assert_exact(late, Case(name="llama"), range(2000 // 3), **TIERS[tier])


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
    session = attach(model, OffloadConfig(min_offload_bytes=0, **TIERS[tier]))
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


def test_two_models_at_once(late):
    cases = [Case(name="gpt2"), Case(name="llama", device="late:1")]
    plain = [train(case, build(case))[0] for case in cases]
    for seed in range(3):
        late.reseed(seed)
        models = [build(case) for case in cases]
        sessions = [attach(model, OffloadConfig(min_offload_bytes=0, tier="ssd")) for model in models]
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
    session = None if tier is None else attach(model, OffloadConfig(min_offload_bytes=0, tier=tier))
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
    monkeypatch.setattr("hf_offload.plan.plan.WRITE_BEHIND_BYTES", 1 << 20)  # the model is small, too
    assert _peak(late, tier, pace) < 0.4 * _peak(late, None, pace)


@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_no_memory_to_read_ahead_narrows_the_window(late, tier):
    """Backward goes on with what it needs, and does not try as much again each time, which would flush the cache."""
    case = Case(name="llama")
    plain, _ = train(case, build(case))
    model = build(case)
    session = attach(model, OffloadConfig(min_offload_bytes=0, read_ahead_bytes=1 << 20, tier=tier))
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
    session = attach(model, OffloadConfig(min_offload_bytes=0, tier="ram"))
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
        attach(model, OffloadConfig(min_offload_bytes=0, tier="ram"))
    model = build(Case())
    model.compile(mode="max-autotune-no-cudagraphs")
    attach(model, OffloadConfig(min_offload_bytes=0, tier="ram")).detach()
