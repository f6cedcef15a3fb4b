"""``hf-offload doctor --check``: whether everything works on this device, tried on the device itself.

Each check is small and takes seconds. What is compared is compared on the device, bit by bit, with deterministic
algorithms, so that a difference is the engine's.
"""

import contextlib
import dataclasses
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_offload.errors import OffloadError
from hf_offload.planning.hardware import link_rates
from hf_offload.planning.machine import default_device
from hf_offload.session import attach
from hf_offload.settings.schema import OffloadConfig
from hf_offload.settings.sizes import format_bytes

_STEPS = 4
_WIDTH, _BLOCKS, _BATCH, _TOKENS, _VOCABULARY = 256, 4, 4, 128, 512
_STALL = 2048  # rows of the matrices that keep a stream busy
# One byte; no multiple of anything; what goes in one chunk; what goes in several.
_SIZES = (1, 4097, (1 << 20) + 3, (40 << 20) + 513)


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was tried: what came of it in words, and how long it took."""

    name: str
    passed: bool
    detail: str
    seconds: float


def run_checks(
    directories: Sequence[str | os.PathLike[str]],
    device: torch.device | None = None,
    on_start: Callable[[str], None] = lambda name: None,
) -> list[Check]:
    """Try everything on ``device`` (default: the current accelerator, or the CPU); files go to ``directories``.

    ``on_start`` is called with each check's name before it runs. A check that raises has failed; only Ctrl-C ends them all.
    """
    device = device or default_device()
    folders = [str(Path(folder)) for folder in directories]
    tiers = {"ram": OffloadConfig(tier="ram", min_bytes=0)}
    tiers["ssd"] = OffloadConfig(tier="ssd", directory=folders, min_bytes=0)
    work: dict[str, Callable[[], str]] = {}
    for tier, config in tiers.items():
        work[f"bytes there and back, {tier}"] = partial(_check_bytes, config, device)
        work[f"training, {tier}"] = partial(_check_training, config, device)
        if device.type != "cpu":
            work[f"late copies, {tier}"] = partial(_check_training, config, device, late_copies=True)
    if device.type != "cpu":
        work["link to the host"] = partial(_rates, device)
    found = []
    for name, check in work.items():
        on_start(name)
        begin = time.perf_counter()
        try:
            with _deterministic(), _quiet():
                passed, detail = True, check()
        except Exception as error:  # whatever fails on an unknown device is a result
            passed, detail = False, f"{type(error).__name__}: {error}"
        gc.collect()
        found.append(Check(name, passed, detail, time.perf_counter() - begin))
    return found


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    # What cuBLAS needs for it; read when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # A warning is advice for a training: here, RAM may be moved to RAM on purpose.
    log = logging.getLogger("hf_offload")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


# -- bytes ---------------------------------------------------------------------------------------------------------------


class _Comparison(torch.autograd.Function):
    """Saves a tensor, and compares in backward what comes back with a copy that never left."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, saved: torch.Tensor, copy: torch.Tensor, wrong: list[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(saved)
        ctx.copy, ctx.wrong = copy, wrong
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (found,) = ctx.saved_tensors
        if not torch.equal(found, ctx.copy):
            ctx.wrong.append(found.numel())
        return gradient, None, None, None


class _Saver(nn.Module):
    def __init__(self, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, device=device))
        self.wrong: list[int] = []

    def forward(self, sizes: Sequence[int]) -> torch.Tensor:
        result: torch.Tensor = self.weight * 1
        draw = torch.Generator().manual_seed(0)
        for size in sizes:
            drawn = torch.randint(256, (size,), dtype=torch.uint8, generator=draw, device="cpu").to(self.weight.device)
            result = _Comparison.apply(result, drawn, drawn.clone(), self.wrong)
        return result.sum()


def _check_bytes(config: OffloadConfig, device: torch.device) -> str:
    model = _Saver(device)
    session = attach(model, dataclasses.replace(config, read_ahead_bytes=0))
    try:
        for _ in range(3):
            loss = model(_SIZES)
            session.settle()
            loss.backward()
            session.end_step()
        moved = session.stats.total.loaded_bytes
    finally:
        session.detach()
    if model.wrong:
        raise OffloadError(f"tensors of {', '.join(map(str, sorted(set(model.wrong))))} bytes came back changed")
    if moved < 3 * sum(_SIZES):
        raise OffloadError(f"only {format_bytes(moved)} of {format_bytes(3 * sum(_SIZES))} were moved")
    return f"{format_bytes(moved)} came back identical"


# -- training --------------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)])
        self.mix, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH), nn.Dropout(0.1)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (*hidden.shape[:2], 4, _WIDTH // 4)
        query, key, value = (one.reshape(shape).transpose(1, 2) for one in self.mix(self.norms[0](hidden)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(hidden.shape))
        result: torch.Tensor = hidden + self.mlp(self.norms[1](hidden))
        return result


def _network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    blocks = [_Block() for _ in range(_BLOCKS)]
    return nn.Sequential(nn.Embedding(_VOCABULARY, _WIDTH), *blocks, nn.Linear(_WIDTH, _VOCABULARY)).to(device)


def _train(model: nn.Module, device: torch.device, around: Callable[[], None]) -> tuple[list[torch.Tensor], list[int]]:
    """All losses, and all weights after the last step; and the bytes that were allocated after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found, allocated = [], []
    torch.manual_seed(1)
    for step in range(_STEPS):
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(_VOCABULARY, (_BATCH, _TOKENS), generator=draw, device="cpu").to(device)
        around()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        del loss
        if device.type != "cpu":
            allocated.append(_lowest_allocated(device))
    return found + [parameter.detach() for parameter in model.parameters()], allocated


def _lowest_allocated(device: torch.device) -> int:
    """Bytes that are allocated once the device has done everything, and threads that waited for it have let go."""
    torch.accelerator.synchronize(device)
    found = []
    for _ in range(20):
        found.append(torch.accelerator.memory_allocated(device))
        time.sleep(0.01)
    return min(found)


def _check_training(config: OffloadConfig, device: torch.device, late_copies: bool = False) -> str:
    on_device: dict[str, Any] = {"devices": [device.index], "device_type": device.type}
    with torch.random.fork_rng(**({"devices": []} if device.type == "cpu" else on_device)):
        expected, plain = _train(_network(device), device, lambda: None)
        model = _network(device)
        session = attach(model, config)
        try:
            stall = _stall(session, device) if late_copies else lambda: None

            def around() -> None:
                session.end_step()
                stall()

            found, allocated = _train(model, device, around)
            session.end_step()
            moved, left = session.stats.total.loaded_bytes, session.stats.step.peak_resident_bytes
        finally:
            session.detach()
    wrong = sum(not torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    if wrong:
        raise OffloadError(f"{wrong} of {len(expected)} losses and weights differ from those without offloading")
    if left:
        raise OffloadError(f"{format_bytes(left)} of saved tensors are left in memory after a step")
    growth = [one - other for one, other in zip(allocated, plain, strict=True)]
    if len(set(growth[1:])) > 1:
        raise OffloadError(f"memory after each step grows: {', '.join(format_bytes(nbytes) for nbytes in growth)} more")
    if moved == 0:
        raise OffloadError("nothing was moved")
    return f"{_STEPS} steps, losses and weights identical, {format_bytes(moved)} read back, nothing left"


def _stall(session: Any, device: torch.device) -> Callable[[], None]:
    """Give the engine's streams something long to do, so that copies come late."""
    mover = session._engine.transfer.mover
    square = torch.ones(_STALL, _STALL, device=device)

    def stall() -> None:
        for stream in (mover.store_stream, mover.load_stream):
            with stream:
                for _ in range(20):
                    square @ square

    return stall


def _rates(device: torch.device) -> str:
    rates = link_rates(device)
    store, load, both = (format_bytes(rates[f"ram {way}"]) for way in ("store", "load", "both"))
    return f"{store}/s out, {load}/s in, {both}/s both at once"
