"""The training itself, in a process of its own: ``python -m benchmarks.large.run JSON``. It prints an event a line."""

import json
import os
import sys
import time
from typing import Any

import torch

from benchmarks.large.memory import Sample, counters, sampled
from benchmarks.large.shape import LEARNING_RATE, Shape, text_tokens
from hf_offload import create_from_config
from hf_offload.session import attach
from hf_offload.training.gauges import choose_gauge


def train(shape: Shape, directory: str, most_written_bytes: int, seconds: float) -> None:
    """Make the model on the drive, and train it. No step begins that would end later than ``seconds`` from now."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    gauge = choose_gauge(torch.device("cpu"))
    started = begin = time.perf_counter()
    longest = 0.0
    process_bytes = gauge.level()
    settings = shape.settings(directory, most_written_bytes, process_bytes)
    with sampled({}, gauge) as samples:
        model = create_from_config(GPT2LMHeadModel, shape.model_config(), config=settings).train()
    session = attach(model, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    session.prepare_optimizer(optimizer)
    session.defer_updates()
    weights = sum(p.numel() for p in model.parameters())
    _say(
        "made",
        seconds=time.perf_counter() - begin,
        weights=weights,
        peak_bytes=gauge.peak(),
        anonymous_bytes=_anonymous(samples),
        **_moved(session),
    )
    batches = text_tokens(shape.tokens)
    for number in range(shape.steps):
        if time.perf_counter() - started + longest > seconds:
            break
        tokens = next(batches)
        before = _moved(session)
        gauge.reset_peak()
        begin = time.perf_counter()
        with sampled(counters(session, optimizer), gauge) as samples:
            with session.scope():
                loss = model(input_ids=tokens, labels=tokens).loss
                forward_s = time.perf_counter() - begin
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.end_step()
            step_s = time.perf_counter() - begin
        longest = max(longest, step_s)
        moved = {name: count - before[name] for name, count in _moved(session).items()}
        _say(
            "step",
            number=number,
            seconds=step_s,
            forward_s=forward_s,
            loss=loss.item(),
            peak_bytes=gauge.peak(),
            anonymous_bytes=_anonymous(samples),
            most_weight_bytes=0 if session.residency is None else session.residency.most_bytes,
            activations=session.stats.steps[-1].as_dict(),
            samples=samples,
            planned=_planned(session, process_bytes),
            **moved,
        )


def _anonymous(samples: list[Sample]) -> float:
    """The most in any of these."""
    return max(one["anonymous"] for one in samples)


def _planned(session: Any, process_bytes: int) -> dict[str, Any] | None:
    """What the plan for the next step predicts; None without one."""
    if session.forecast is None:
        return None
    return {
        "peak_bytes": session.forecast.peak_bytes + process_bytes,
        "step_s": session.forecast.step_s,
        "reason": session.plan.reason,
    }


def _moved(session: Any) -> dict[str, int]:
    """Bytes read and written so far, in all and by what they are."""
    found: dict[str, int] = {"read_bytes": 0, "written_bytes": 0}
    for account, tiers in session.stats.accounts.items():
        for tier in tiers.values():
            for kind in ("read_bytes", "written_bytes"):
                found[kind] += getattr(tier, kind)
                name = f"{account} {kind}"
                found[name] = found.get(name, 0) + getattr(tier, kind)
    return found


def _say(event: str, **what: Any) -> None:
    sys.stdout.write(f"{json.dumps({'event': event, **what})}\n")
    sys.stdout.flush()


def main(text: str) -> None:
    """Train as the JSON says."""
    given = json.loads(text)
    train(Shape(**given["shape"]), given["directory"], given["most_written_bytes"], given["seconds"])
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
