"""``python -m benchmarks NAME``."""

import typer

from benchmarks.accuracy import accuracy
from benchmarks.allocators import allocators
from benchmarks.budgets.command import budgets
from benchmarks.choices import choices
from benchmarks.large.command import large
from benchmarks.lengths import lengths
from benchmarks.limits import limits
from benchmarks.loss import loss
from benchmarks.mezo.command import mezo
from benchmarks.mezo.sentences import mezo_sentences
from benchmarks.modes.command import modes
from benchmarks.orders import orders
from benchmarks.predictions import predictions
from benchmarks.sampling import sampling
from benchmarks.snapshots import snapshots
from benchmarks.state.command import state
from benchmarks.weights.command import weights

app = typer.Typer(
    name="benchmarks",
    help="Measure what the documentation's tables show.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    accuracy,
    allocators,
    budgets,
    choices,
    large,
    lengths,
    limits,
    loss,
    mezo,
    mezo_sentences,
    modes,
    orders,
    predictions,
    sampling,
    snapshots,
    state,
    weights,
):
    app.command()(command)

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
