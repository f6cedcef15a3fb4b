"""What these cores and this drive allow, in a process of its own: ``python -m benchmarks.large.roofline JSON``."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.large.shape import Shape, text_tokens
from hf_offload.planning.machine import probe_machine

_SAMPLE_BYTES = 2 << 30
_REPEATS = 5


def measure(shape: Shape, directory: str) -> dict[str, Any]:
    """Seconds of forward and backward of one block and of all the rest, in memory, and the rates of the drive."""
    from transformers import GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = shape.model_config()
    config._attn_implementation = "sdpa"
    block = GPT2Block(config, layer_idx=0)
    hidden = torch.randn(1, shape.tokens, shape.width, requires_grad=True)

    def summed(block: nn.Module) -> Tensor:
        result = block(hidden)
        return (result[0] if isinstance(result, tuple) else result).sum()

    of_block = _seconds(summed, block)
    del block
    config.n_layer = 0
    rest = GPT2LMHeadModel(config).train()
    tokens = next(text_tokens(shape.tokens))
    of_rest = _seconds(lambda rest: rest(input_ids=tokens, labels=tokens).loss, rest)
    del rest
    drive = probe_machine([directory], sample_bytes=_SAMPLE_BYTES).drives[0]
    return {
        "block_s": of_block,
        "rest_s": of_rest,
        "compute_s": shape.layers * of_block + of_rest,
        "write_bytes_per_s": drive.write.bytes_per_s,
        "read_bytes_per_s": drive.read.bytes_per_s,
        "both_bytes_per_s": drive.both.bytes_per_s,
    }


def _seconds(forward: Callable[[Any], Tensor], module: nn.Module) -> float:
    """Of a forward and its backward: the median of those behind the first one."""
    seconds = []
    for _ in range(1 + _REPEATS):
        begin = time.perf_counter()
        forward(module).backward()  # type: ignore[no-untyped-call]
        seconds.append(time.perf_counter() - begin)
        module.zero_grad()
    return statistics.median(seconds[1:])


def main(text: str) -> None:
    """Print what was measured as the last line."""
    given = json.loads(text)
    sys.stdout.write(f"\n{json.dumps(measure(Shape(**given['shape']), given['directory']))}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
