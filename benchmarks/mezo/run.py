"""The training itself, in a process of its own: ``python -m benchmarks.mezo.run JSON``. It prints an event a line."""

import json
import os
import sys
import time
from typing import Any

import torch

from benchmarks.large.shape import Shape, text_tokens
from hf_offload import OffloadConfig, create_from_config
from hf_offload.session import attach
from hf_offload.training.gauges import choose_gauge

_RATE = 1e-7


def train(shape: Shape, directory: str, seconds: float) -> None:
    """Make the model on the drive, and train it. No step begins that would end later than ``seconds`` from now."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    gauge = choose_gauge(torch.device("cpu"))
    started = begin = time.perf_counter()
    settings = OffloadConfig(tier="none", params="ssd", memory_mode="mezo", directory=directory)
    model: Any = create_from_config(GPT2LMHeadModel, shape.model_config(), config=settings)
    model.config.use_cache = False
    session = attach(model, settings)
    optimizer: Any = session.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=_RATE))
    residency = session.residency
    assert residency is not None
    _say("made", seconds=time.perf_counter() - begin, peak_bytes=gauge.peak(), limit_bytes=residency.limit_bytes)
    batches = text_tokens(shape.tokens)
    longest = 0.0
    for number in range(shape.steps):
        if time.perf_counter() - started + longest > seconds:
            break
        tokens = next(batches)
        written, read = residency.moved_bytes
        gauge.reset_peak()
        begin, begin_cores = time.perf_counter(), time.process_time()
        loss = optimizer.step(lambda: model(input_ids=tokens, labels=tokens).loss)  # noqa: B023 - at once
        step_s = time.perf_counter() - begin
        longest = max(longest, step_s)
        written_now, read_now = residency.moved_bytes
        _say(
            "step",
            number=number,
            seconds=step_s,
            cores_s=time.process_time() - begin_cores,
            loss=loss.item(),
            projected_gradient=optimizer.projected_gradient,
            peak_bytes=gauge.peak(),
            most_weight_bytes=residency.most_bytes,
            read_bytes=read_now - read,
            written_bytes=written_now - written,
        )


def _say(event: str, **what: Any) -> None:
    sys.stdout.write(f"{json.dumps({'event': event, **what})}\n")
    sys.stdout.flush()


def main(text: str) -> None:
    """Train as the JSON says."""
    given = json.loads(text)
    train(Shape(**given["shape"]), given["directory"], given["seconds"])
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
