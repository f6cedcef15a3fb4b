"""``hf-offload bench``: its commands."""

import typer

from hf_offload.cli.bench_accuracy import accuracy
from hf_offload.cli.bench_budgets import budgets
from hf_offload.cli.bench_disk import disk
from hf_offload.cli.bench_limits import limits
from hf_offload.cli.bench_loss import loss
from hf_offload.cli.bench_modes import modes
from hf_offload.cli.bench_overhead import overhead
from hf_offload.cli.bench_sampling import sampling
from hf_offload.cli.bench_steps import steps

bench = typer.Typer(help="Measure, side by side.", no_args_is_help=True)
for command in (steps, limits, disk, overhead, budgets, loss, accuracy, modes, sampling):
    bench.command()(command)
