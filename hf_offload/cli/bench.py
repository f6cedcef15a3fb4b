"""``hf-offload bench``: its commands."""

import typer

from hf_offload.cli.bench_disk import disk
from hf_offload.cli.bench_overhead import overhead
from hf_offload.cli.bench_steps import steps

bench = typer.Typer(help="Measure training steps, drives and the overhead of a saved tensor.", no_args_is_help=True)
for command in (steps, disk, overhead):
    bench.command()(command)
