"""What sampled linear layers and recompute of elementwise operations need on a card, and other ways: counted, not run.

Shapes and baseline are those of the WTA-CRS paper (Liu et al., NeurIPS 2023, arXiv 2305.15265): classification of 128 tokens
in float32, attention that saves its matrices (``eager``), all weights trained with AdamW.
"""

import dataclasses
import json as json_format
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from transformers.utils import logging as transformers_log

from benchmarks.console import show_table
from hf_offload.cli.console import clear_errors, output, progress_bar
from hf_offload.cli.options import Json
from hf_offload.forecast.workload import count_workload
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import Hardware, describe_hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import make_problem
from hf_offload.plan.search import uniform
from hf_offload.plan.simulate import simulate
from hf_offload.plan.timeline import Windows
from hf_offload.reports.formats import json_text, markdown_table, write_texts
from hf_offload.settings.elementwise import RecomputeElementwiseConfig
from hf_offload.settings.load import choose
from hf_offload.settings.outputs import check_output_folder
from hf_offload.settings.sampling import SampledLinearConfig

SEQUENCE = 128
SHAPES: dict[str, dict[str, Any]] = {
    "bert-base": {"batch": 100, "task": "sequence-classification"},
    # The class is a word, and its end.
    "t5-base": {"batch": 128, "target_sequence": 4},
    "t5-large": {"batch": 64, "target_sequence": 4},
}
"""Name -> batch and what else the paper's shape has of its own."""

_LORA = {"memory_mode": "lora", "memory_mode_kwargs": {"rank": 32}}
# The layers that the paper gives adapters, as BERT and T5 call them.
_LORA_TARGETS = {"bert-base": "query,key,value", "t5-base": "q,k,v", "t5-large": "q,k,v"}


def _sampled(ratio: float, *switches: str) -> dict[str, Any]:
    return {"sampled_linear": SampledLinearConfig(ratio=ratio)} | _elementwise(*switches)


def _elementwise(*switches: str) -> dict[str, Any]:
    return {"recompute_elementwise": RecomputeElementwiseConfig(switches)} if switches else {}


BASELINE, FAIR = "full, eager", "full"
# With sampling, what costs no bytes: inputs that are recomputed would be sampled in vain.
_WITH_SAMPLING = ("dropout", "activations")
WAYS: dict[str, dict[str, Any]] = {
    BASELINE: {"attention": "eager"},
    FAIR: {},
    "full, sampled 0.3": _sampled(0.3),
    "full, sampled 0.3, elementwise": _sampled(0.3, *_WITH_SAMPLING),
    "full, elementwise (exact)": _elementwise("exact"),
    "lora": _LORA,
    "lora, sampled 0.3, eager": {**_LORA, **_sampled(0.3), "attention": "eager"},
    "lora, sampled 0.3": {**_LORA, **_sampled(0.3)},
    "lora, sampled 0.3, elementwise": {**_LORA, **_sampled(0.3, *_WITH_SAMPLING)},
    "lora, sampled 0.1, elementwise": {**_LORA, **_sampled(0.1, *_WITH_SAMPLING)},
    "lora, elementwise (exact)": {**_LORA, **_elementwise("exact")},
}
"""Name -> changes of the workload. Attention is scaled dot product attention where nothing else is said."""


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One way to train one shape: bytes. ``offloaded_peak_bytes`` is with everything that is saved on the SSD."""

    shape: str
    way: str
    saved_bytes: int
    peak_bytes: int
    offloaded_peak_bytes: int | None


def count_sampling(
    shapes: Sequence[str], hardware: Hardware, on_way: Callable[[str], None] = lambda way: None
) -> list[MemoryRow]:
    """All ways of each of ``shapes``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for an unknown shape.
    """
    for shape in shapes:
        choose("shape", shape, SHAPES)
    rows = []
    for shape in shapes:
        workload = dataclasses.replace(find_workload(shape), attention="sdpa", sequence=SEQUENCE, **SHAPES[shape])
        for way, changes in WAYS.items():
            on_way(f"{shape}, {way}")
            changed = workload.changed(**changes)
            if changed.mode is not None:
                changed = changed.in_mode(
                    changed.memory_mode, {**changed.memory_mode_kwargs, "targets": _LORA_TARGETS[shape]}
                )
            footprint = count_workload(changed, hardware)
            rows.append(
                MemoryRow(
                    shape,
                    way,
                    sum(one.nbytes for one in footprint.saved),
                    _kept_peak(footprint),
                    _offloaded_peak(footprint, hardware),
                )
            )
    return rows


def _kept_peak(footprint: Footprint) -> int:
    placements = dict.fromkeys(footprint.units, Placement.KEEP)
    return simulate(footprint, placements, {}, Windows(0, 0), details=True).peak_bytes


def _offloaded_peak(footprint: Footprint, hardware: Hardware) -> int | None:
    solution = uniform(make_problem(footprint, hardware, int(hardware.memory_bytes.value)), Placement.SSD)
    return None if solution is None else solution.timeline.peak_bytes


# Ratios are baseline over this: how many times less it needs.
COLUMNS = ("way", "saved", "peak", "eager : it", "full : it", "on SSD", "eager : it")


def texts(rows: Sequence[MemoryRow]) -> list[list[str]]:
    """The rows of one shape as the texts of :data:`COLUMNS`."""
    peaks = {row.way: row.peak_bytes for row in rows}
    lines = []
    for row in rows:
        offloaded = ["-", "-"]
        if row.offloaded_peak_bytes is not None:
            offloaded = [_gb(row.offloaded_peak_bytes), f"{peaks[BASELINE] / row.offloaded_peak_bytes:.2f}"]
        lines.append(
            [
                row.way,
                _gb(row.saved_bytes),
                _gb(row.peak_bytes),
                f"{peaks[BASELINE] / row.peak_bytes:.2f}",
                f"{peaks[FAIR] / row.peak_bytes:.2f}",
                *offloaded,
            ]
        )
    return lines


def describe(shape: str) -> str:
    """The shape in one line."""
    settings = SHAPES[shape]
    return f"{shape}, batch {settings['batch']} x {SEQUENCE} tokens, float32, AdamW"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def sampling(
    shapes: Annotated[
        str, typer.Argument(help="bert-base, t5-base, t5-large, with commas between.")
    ] = "bert-base,t5-base,t5-large",
    gpu: Annotated[str, typer.Option(help="A card, as hf-offload plan has it.")] = "a100-80gb",
    output_dir: Annotated[Path, typer.Option("--output", help="Folder for the tables.")] = Path("runs/sampling"),
    json: Json = False,
) -> None:
    """Count what sampled linear layers and elementwise recompute save on a card, at the shapes of the WTA-CRS paper.

    How accurate is what is trained so: python -m benchmarks accuracy. How fast: hf-offload bench steps --strategies
    baseline,ours:sampled,ours:elementwise.
    """
    with clear_errors():
        check_output_folder(output_dir, "--output", "sampling.md", "sampling.json")
        transformers_log.set_verbosity_error()
        names = [name.strip() for name in shapes.split(",")]
        hardware = describe_hardware(gpu)
        with progress_bar(counted=False) as progress:
            task = progress.add_task("starting", total=None)
            rows = count_sampling(names, hardware, lambda way: progress.update(task, description=escape(way)))
    found = [dataclasses.asdict(row) for row in rows]
    tables = {name: texts([row for row in rows if row.shape == name]) for name in names}
    lines = [line for name in names for line in (f"## {describe(name)}", "", markdown_table(COLUMNS, tables[name]), "")]
    write_texts(output_dir, {"sampling.md": "\n".join(lines), "sampling.json": json_text({"gpu": gpu, "rows": found})})
    if json:
        typer.echo(json_format.dumps(found, indent=2))
        return
    for name in names:
        show_table(COLUMNS, tables[name], left=("way",), title=describe(name))
    output().print(
        "Counted on tensors without data. eager: attention that saves its matrices, the paper's baseline; elsewhere it is "
        "scaled dot product attention. on SSD: the peak with everything that is saved there.",
        highlight=False,
    )
