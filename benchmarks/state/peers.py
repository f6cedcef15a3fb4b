"""What others offer for optimizer state that does not fit, set up as their documentation says."""

import functools
import importlib
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.state.ways import IN_MEMORY, LEARNING_RATE, MAX_NORM, Loop, train_in_torch
from hf_offload.errors import OffloadConfigError
from hf_offload.session import OffloadSession


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise OffloadConfigError(f"{error.name} is not installed: docs/benchmarks.md says how.") from error


def train_with_deepspeed(
    stage: int, device: str, moves_weights: bool, model: torch.nn.Module, session: OffloadSession, folder: Path
) -> Loop:
    """ZeRO of one process, its AdamW and its clipping. If it ``moves_weights``, they are on the device as well.

    Source: DeepSpeed's configuration, ``zero_optimization.offload_optimizer`` and ``offload_param``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if not torch.accelerator.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed = _package("deepspeed")
    offload = {"device": device} | ({"nvme_path": str(folder)} if device == "nvme" else {})
    # The default updates 1e9 weights at once, and holds their state meanwhile.
    small_groups = {"sub_group_size": 10_000_000} if stage == 3 else {}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": MAX_NORM,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": stage,
                "offload_optimizer": offload,
                **({"offload_param": offload} if moves_weights else {}),
                **small_groups,
            },
        },
    )

    def weights() -> Iterable[torch.Tensor]:
        parameters = list(model.parameters())
        if stage < 3:
            return parameters
        with deepspeed.zero.GatheredParameters(parameters):
            return [p.detach().clone() for p in parameters]

    return Loop(engine, engine.backward, engine.step, weights)


def _train_with_torchao(offload_gradients: bool, model: torch.nn.Module, session: OffloadSession, folder: Path) -> Loop:
    """The optimizer of torchao over ``torch.optim.AdamW``. Source: the README of ``torchao.optim``.

    Gradients that it has moved are not there to be clipped.
    """
    optimizer = _package("torchao.optim").CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=offload_gradients, lr=LEARNING_RATE, fused=True
    )

    def update() -> None:
        if not offload_gradients:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, torch.Tensor.backward, update, model.parameters)


def _train_mapped(model: torch.nn.Module, session: OffloadSession, folder: Path) -> Loop:
    """``torch.optim.AdamW`` whose gradients and state are files in memory: the kernel moves them."""

    def mapped(like: torch.Tensor, name: str) -> torch.Tensor:
        file = str(folder / name)
        return torch.from_file(file, shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    for number, parameter in enumerate(model.parameters()):
        # A new file reads as zeros, which is what AdamW begins with.
        parameter.grad = mapped(parameter, f"gradient_{number}")
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": mapped(parameter, f"exp_avg_{number}"),
            "exp_avg_sq": mapped(parameter, f"exp_avg_sq_{number}"),
        }

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return Loop(model, torch.Tensor.backward, update, model.parameters)


def _train_in_memory(model: torch.nn.Module, session: OffloadSession, folder: Path) -> Loop:
    return train_in_torch(IN_MEMORY, model, session)


TORCHAO_GRADIENTS, SWAP, MAPPED_LIMITED = "torchao-gradients", "swap", "mapped-limited"
LIMITED = (SWAP, MAPPED_LIMITED)
"""Run with no more memory than the lazy way takes."""

PEERS: dict[str, Callable[[torch.nn.Module, OffloadSession, Path], Loop]] = {
    **{
        f"deepspeed-{stage}-{device}": functools.partial(train_with_deepspeed, stage, device, False)
        for stage in (2, 3)
        for device in ("cpu", "nvme")
    },
    "torchao": functools.partial(_train_with_torchao, False),
    TORCHAO_GRADIENTS: functools.partial(_train_with_torchao, True),
    "mapped": _train_mapped,
    SWAP: _train_in_memory,
    MAPPED_LIMITED: _train_mapped,
}
