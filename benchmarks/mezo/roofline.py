"""What these cores and this drive allow, in a process of its own: ``python -m benchmarks.mezo.roofline JSON``."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.large.shape import Shape, text_tokens
from hf_offload.optimizers.mezo.directions import MINUS, PLUS, Directions, Move, Shift, Update
from hf_offload.planning.machine import probe_machine

_SAMPLE_BYTES = 1 << 30
_REPEATS = 3
_DRAWN = 1 << 24


@torch.no_grad()
def measure(shape: Shape, directory: str) -> dict[str, Any]:
    """Seconds of a forward pass in memory, of the three directions that a step draws with the moves along them, and the
    rates of the drive.
    """
    from transformers import GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = shape.model_config()
    config._attn_implementation = "sdpa"
    block = GPT2Block(config, layer_idx=0).eval()
    hidden = torch.randn(1, shape.tokens, shape.width)
    of_block = _seconds(lambda: block(hidden))
    config.n_layer = 0
    rest = GPT2LMHeadModel(config).eval()
    tokens = next(text_tokens(shape.tokens))
    of_rest = _seconds(lambda: rest(input_ids=tokens, labels=tokens).loss)
    drive = probe_machine([directory], sample_bytes=_SAMPLE_BYTES).drives[0]
    return {
        "forward_s": shape.layers * of_block + of_rest,
        "directions_s": _of_directions() * shape.weights / _DRAWN,
        "write_bytes_per_s": drive.write.bytes_per_s,
        "read_bytes_per_s": drive.read.bytes_per_s,
        "both_bytes_per_s": drive.both.bytes_per_s,
    }


def _of_directions() -> float:
    """The moves of a step, as a weight on a tier makes them."""
    weight = torch.randn(_DRAWN)
    directions = Directions([weight])
    last: list[Move] = [Shift(0, MINUS, 1e-3), Shift(0, PLUS, 1e-3), Update(0, 0.1, 1e-6, 0.0)]

    def moves() -> None:
        directions.make([(directions.generator(0), last), (directions.generator(1), [Shift(1, PLUS, 1e-3)])], weight)
        directions.make([(directions.generator(1), [Shift(1, MINUS, 1e-3)])], weight)

    return _seconds(moves)


def _seconds(work: Callable[[], Any]) -> float:
    """The median of those behind the first time."""
    seconds = []
    for _ in range(1 + _REPEATS):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def main(text: str) -> None:
    """Print what was measured as the last line."""
    given = json.loads(text)
    sys.stdout.write(f"\n{json.dumps(measure(Shape(**given['shape']), given['directory']))}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
