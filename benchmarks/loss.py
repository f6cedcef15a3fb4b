"""Output head and loss alone: the usual way, in pieces, and Liger's kernel where it is installed.

Memory is what a forward and a backward need on top of hidden states, weights and their gradients; a separate run counts it.
"""

import dataclasses
import importlib.util
import json as json_format
import statistics
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from benchmarks.console import show_table
from benchmarks.measure import now_s, peak_bytes
from hf_offload.cli.console import clear_errors, progress_bar
from hf_offload.cli.options import Json
from hf_offload.errors import OffloadConfigError
from hf_offload.planning.machine import default_device
from hf_offload.settings.load import choose
from hf_offload.settings.sizes import format_bytes, parse_bytes
from hf_offload.transforms.tiling.cut import Cut
from hf_offload.transforms.tiling.head import TiledHead

UNTILED, TILED, LIGER = "untiled", "tiled", "liger"

SHAPES: dict[str, tuple[int, int, int]] = {
    "gpt2": (50257, 768, 4 * 512),
    "llama-3.2-1b": (128256, 2048, 4096),
}
"""Name -> vocabulary, hidden size, tokens."""

Work = Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class LossRow:
    """One way to compute one head's loss. ``extra_bytes`` is memory in addition to inputs, weights and gradients."""

    shape: str
    way: str
    dtype: str
    device: str
    extra_bytes: int
    seconds: tuple[float, ...]
    loss: float

    @property
    def median_s(self) -> float:
        """Of a forward and a backward."""
        return statistics.median(self.seconds)


def bench_loss(
    shape: str,
    dtype: torch.dtype,
    rounds: int,
    tile_bytes: int | None,
    on_run: Callable[[str], None] = lambda way: None,
) -> list[LossRow]:
    """All ways of one shape, in turns.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for an unknown shape.
    """
    choose("shape", shape, SHAPES)
    vocabulary, width, tokens = SHAPES[shape]
    device = default_device()
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), device=device)
    weight = torch.randn(vocabulary, width, device=device).mul_(width**-0.5).to(dtype)
    ways = _ways(hidden, labels, weight, tile_bytes)
    kept = hidden.numel() * hidden.element_size() + weight.numel() * weight.element_size()  # the gradients
    extra, losses = {}, {}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for way, (head, work) in ways.items():
        on_run(f"{way}: memory")
        extra[way] = peak_bytes(lambda head=head, work=work: _step(head, hidden, work), device) - kept  # type: ignore[misc]
    for _ in range(rounds):
        for way, (head, work) in ways.items():
            on_run(f"{way}: time")
            began = now_s(device)
            losses[way] = _step(head, hidden, work)
            seconds[way].append(now_s(device) - began)
    name = str(dtype).removeprefix("torch.")
    return [LossRow(shape, way, name, str(device), extra[way], tuple(seconds[way]), losses[way]) for way in ways]


def _ways(hidden: Tensor, labels: Tensor, weight: Tensor, tile_bytes: int | None) -> dict[str, tuple[nn.Linear, Work]]:
    def head_of() -> nn.Linear:
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(weight)
        return head

    def usual(head: nn.Linear) -> Tensor:
        return nn.functional.cross_entropy(head(hidden).float(), labels)

    plain, tiled = head_of(), head_of()
    TiledHead("head", tiled, Cut(tile_bytes=tile_bytes)).install()
    ways: dict[str, tuple[nn.Linear, Work]] = {
        UNTILED: (plain, lambda: usual(plain)),
        TILED: (tiled, lambda: usual(tiled)),
    }
    if hidden.is_cuda and importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

        liger, fused = head_of(), LigerFusedLinearCrossEntropyLoss()
        ways[LIGER] = (liger, lambda: fused(liger.weight, hidden, labels))
    return ways


def _step(head: nn.Linear, hidden: Tensor, work: Work) -> float:
    head.weight.grad = hidden.grad = None
    loss = work()
    loss.backward()
    return loss.item()


def dtype_of(name: str) -> torch.dtype:
    """``float32`` or ``bfloat16``. Raises :class:`~hf_offload.errors.OffloadConfigError`."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise OffloadConfigError(f"dtype={name!r} is none of {', '.join(known)}.")
    return known[name]


def loss(
    shapes: Annotated[
        str, typer.Argument(help="gpt2, llama-3.2-1b, or both with a comma between.")
    ] = "gpt2,llama-3.2-1b",
    dtype: Annotated[str, typer.Option(help="Of hidden states and weights: float32 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option(min=1, help="How often each way runs; they take turns.")] = 3,
    tile_bytes: Annotated[
        str | None, typer.Option(help="Size of the logits of one piece, such as 64MiB. Default: a sixteenth of all.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure the output head and the loss alone: the usual way, in pieces, and with Liger's kernel where it is installed."""
    with clear_errors():
        names = [name.strip() for name in shapes.split(",")]
        for name in names:
            choose("shape", name, SHAPES)
        size = None if tile_bytes is None else parse_bytes(tile_bytes, "tile_bytes")
        found: list[LossRow] = []
        with progress_bar(counted=False) as progress:
            task = progress.add_task("starting", total=None)
            for name in names:
                found += bench_loss(
                    name,
                    dtype_of(dtype),
                    rounds,
                    size,
                    lambda what, name=name: progress.update(task, description=f"{name}, {what}"),  # type: ignore[misc]
                )
    if json:
        typer.echo(json_format.dumps([dataclasses.asdict(row) for row in found], indent=2))
        return
    show_table(
        ("shape", "way", "memory", "of untiled", "time", "of untiled", "spread", "loss"),
        [_texts(row, next(one for one in found if one.shape == row.shape)) for row in found],
        left=("shape", "way"),
        title=f"Output head and loss, forward and backward, {dtype} on {found[0].device}",
        caption="Memory: in addition to hidden states, weights and their gradients. Time: median.",
    )


def _texts(row: LossRow, usual: LossRow) -> list[str]:
    return [
        row.shape,
        row.way,
        format_bytes(row.extra_bytes),
        f"{row.extra_bytes / usual.extra_bytes:.3f}",
        f"{row.median_s:.3g} s",
        f"{row.median_s / usual.median_s:.3f}",
        f"{min(row.seconds):.3g}..{max(row.seconds):.3g} s",
        f"{row.loss:.6f}",
    ]
