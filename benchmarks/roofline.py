"""What a machine allows: the seconds that its cores take for a step in memory, and the rates of its drive."""

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from benchmarks.large.shape import Shape, text_tokens
from hf_offload.planning.machine import probe_machine

_SAMPLE_BYTES = 2 << 30
_REPEATS = 3
_DEPTHS = (2, 6)


def seconds_in_memory(
    shape: Shape,
    prepare: Callable[[nn.Module, Tensor], Callable[[], Any]],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Of what ``prepare(model, tokens)`` returns, if all of the model were in memory: a line through two models of few
    layers. A single block would be faster than one of a model, whose activations are not at hand any more.
    """
    from transformers import GPT2LMHeadModel

    tokens = next(text_tokens(shape.tokens))
    few, more = (
        median_s(
            prepare(GPT2LMHeadModel._from_config(dataclasses.replace(shape, layers=layers).model_config()), tokens),
            clock,
        )
        for layers in _DEPTHS
    )
    return few + (shape.layers - _DEPTHS[0]) * (more - few) / (_DEPTHS[1] - _DEPTHS[0])


def median_s(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of ``work`` by ``clock``: the median of those behind the first one."""
    seconds = []
    for _ in range(1 + _REPEATS):
        begin = clock()
        work()
        seconds.append(clock() - begin)
    return statistics.median(seconds[1:])


def drive_rates(shape: Shape, directory: str) -> dict[str, float | None]:
    """Bytes a second of the drive under ``directory``: written, read, and in all while it does both."""
    drive = probe_machine([directory], sample_bytes=min(_SAMPLE_BYTES, shape.weight_bytes)).drives[0]
    return {
        "write_bytes_per_s": drive.write.bytes_per_s,
        "read_bytes_per_s": drive.read.bytes_per_s,
        "both_bytes_per_s": drive.both.bytes_per_s,
    }


def print_measured(measure: Callable[[Shape, str], dict[str, Any]]) -> None:
    """End this process with what ``measure`` finds, for the shape and the directory in its argument, as the last line."""
    given = json.loads(sys.argv[1])
    sys.stdout.write(f"\n{json.dumps(measure(Shape(**given['shape']), given['directory']))}\n")
    sys.stdout.flush()
    os._exit(0)
