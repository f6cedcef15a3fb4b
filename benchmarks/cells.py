"""Cells: what one process measures, and what it trains."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks.kernel import in_group
from hf_offload.allocator import environment_with
from hf_offload.errors import OffloadError

PEER_TIMEOUT_S = 3600
Result = dict[str, Any]


def random_gpt2(layers: int, width: int, vocabulary: int, sequence: int) -> nn.Module:
    """A GPT-2 with the random values of seed 0, in the mode of training."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=width // 64,
        vocab_size=vocabulary,
        n_positions=sequence,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def digest_of(weights: Iterable[Tensor]) -> str:
    """Of the bytes of all weights, one after the other."""
    digest = hashlib.sha256()
    for parameter in weights:
        digest.update(parameter.detach().clone().numpy().tobytes())
    return digest.hexdigest()


def run_cell(module: str, cell: Any, group: Path | None = None, timeout_s: float | None = None) -> Result:
    """What ``python -m module`` prints for ``cell``, in this memory group.

    Raises :class:`~hf_offload.errors.OffloadError` with what it wrote if it fails.
    """
    command = [sys.executable, "-m", module, json.dumps(dataclasses.asdict(cell))]
    done = subprocess.run(
        command if group is None else in_group(group, command),
        env=environment_with("auto") | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode:
        raise OffloadError(f"{cell.way}: the run ended with code {done.returncode}: {done.stderr[-2000:]}")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def answer(measure: Callable[[Any], Result], cell: Any, peers: Container[str]) -> None:
    """Print what was measured as the last line, and end the process. An error of one of the ``peers`` is a result."""
    try:
        result = measure(cell)
    except Exception as error:
        if cell.way not in peers:
            raise
        result = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(f"\n{json.dumps(result)}\n")
    sys.stdout.flush()
    os._exit(0)
