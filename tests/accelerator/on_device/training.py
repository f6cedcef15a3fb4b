"""Training on the late device, without and with offloading: every loss, gradient and weight, and what stays allocated."""

import contextlib
import dataclasses
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, OffloadSession, attach
from hf_offload.state.optimizer import streaming_of
from tests.helpers.architectures import make_batch, make_model
from tests.helpers.parked import state_that_moves
from tests.helpers.tiny_models import gradients, tiny_batch, tiny_model, weights

STEPS = 3
TIERS: dict[str, dict[str, Any]] = {
    "ram": {"tier": "ram"},
    "ssd": {"tier": "ssd"},
    "spill": {"tier": "ssd", "ram_budget": 64 << 10},
    "auto": {"tier": "auto", "memory_budget": 1 << 30},
}
# Behind a spill tier are both others; each of them alone, and whatever auto makes of them, takes its time.
EVERY_TIER = [pytest.param(tier, marks=() if tier == "spill" else pytest.mark.full) for tier in TIERS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    name: str = "gpt2"
    device: str = "late:0"
    accumulation: int = 1
    checkpointing: str | None = None
    retain_graph: bool = False
    own_stream: bool = False


def build(case: Case) -> nn.Module:
    model = make_model("whisper") if case.name == "whisper" else tiny_model(case.name)
    if case.checkpointing is not None:
        # The older name is a deprecated alias where the newer one exists.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": case.checkpointing == "reentrant"})
    return model.to(case.device).train()


def batch(case: Case, seed: int) -> dict[str, torch.Tensor]:
    values = make_batch("whisper", seed) if case.name == "whisper" else tiny_batch(case.name, seed=seed)
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


def let_go_of_what_was_loaded(session: OffloadSession) -> None:
    """A thread holds what was loaded until its copy has ended: it comes to this after all of those."""
    done = threading.Event()
    session._engine.transfer.mover._arrival_workers.submit(done.set)
    assert done.wait(60)


def train_offloaded(case: Case, **settings: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    model = build(case)
    session = attach(model, OffloadConfig(min_bytes=0, **settings))

    def end_step() -> None:
        session.end_step()
        let_go_of_what_was_loaded(session)

    found = train(case, model, end_step)
    assert session.stats.total.refused_bytes == 0
    session.detach()
    return found


def assert_exact(late: Any, case: Case, seeds: range = range(2), **settings: Any) -> None:
    plain, expected = train(case, build(case))
    gc.collect()
    for seed in seeds:
        late.reseed(seed)
        found, allocated = train_offloaded(case, **settings)
        assert differences(plain, found) == [], f"seed {seed}"
        assert allocated == expected, f"seed {seed}"


def park(model: nn.Module, **settings: Any) -> OffloadSession:
    """Weights leave the device after each use, where the settings move any."""
    session = attach(model, OffloadConfig(min_bytes=0, **{"tier": "none"} | settings))
    if session.residency is not None:
        session.residency.limit_bytes = 1
    return session


def train_on_tiers(
    case: Case, *, frozen: bool = False, clip: bool = True, fused: bool = False, **settings: Any
) -> list[torch.Tensor]:
    """Losses, norms, weights and optimizer state of a training, whose weights and state are where the settings say."""
    model = build(case)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(not frozen or number % 3 == 0)
    session = park(model, **settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=fused)
    session.prepare_optimizer(optimizer)
    session.defer_updates()
    torch.manual_seed(7)
    found = []
    for step in range(STEPS):
        for micro in range(case.accumulation):
            loss = model(**batch(case, 10 * step + micro)).loss
            loss.backward()
            found.append(loss.detach().cpu())
            del loss
        if clip:
            found.append(session.clip_grad_norm_(0.5).cpu())
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
    streaming = streaming_of(optimizer)
    if streaming is not None:
        streaming.finish()
        assert any(state_that_moves(streaming, parameter) for parameter in model.parameters())
        devices = {value.device.type for state in optimizer.state.values() for value in state.values() if value.dim()}
        assert devices <= {"late"}
    if session.residency is not None:
        assert session.residency.store.tier.stats.read_bytes > 0
    with torch.no_grad():
        found += [parameter.detach().cpu() for parameter in model.parameters()]
    state = optimizer.state_dict()["state"]
    found += [value.cpu() for place in sorted(state) for _, value in sorted(state[place].items())]
    session.detach()
    return found
