"""Budgets of many architectures, metered from outside: ``python -m tests.budgets --models opt,vit --scenarios plain``.

Prints a line a run: the most that any step after the first had alive, as a share of the budget, and what was predicted; and
a table of the models.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.budgets.meter import is_metered, metered

if TYPE_CHECKING:
    from tests.budgets.runs import Outcome

HERE = Path(__file__).parent


def run_metered(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """This program in a process of its own, whose allocations are counted."""
    with tempfile.TemporaryDirectory() as folder:
        environment = metered(os.environ | {"HF_HUB_OFFLINE": "1"}, Path(folder))
        command = [sys.executable, "-W", "ignore", "-m", "tests.budgets", *arguments]
        return subprocess.run(command, env=environment, cwd=HERE.parents[1], check=False, stdout=sys.stdout, text=True)


def _table(found: "dict[str, list[Outcome]]") -> Table:
    """A row a model: how much of their budgets its runs took, and how far off the predictions were."""
    table = Table(
        "model", "runs", "refused first", "most of a budget", "other bits", "off: keep, recompute", "off: ssd"
    )
    for name, outcomes in found.items():
        worst = max(outcome.worst for outcome in outcomes)
        different = sum(not outcome.is_same for outcome in outcomes)
        refused = sum(outcome.refusals > 0 for outcome in outcomes)
        errors = [_spread([one.error for one in outcomes if one.moves is moves]) for moves in (False, True)]
        table.add_row(name, str(len(outcomes)), str(refused), f"{worst:.3f}", str(different), *errors)
    return table


def _spread(errors: list[float]) -> str:
    """Least, median, most."""
    if not errors:
        return ""
    return f"{min(errors):+.1%} {statistics.median(errors):+.1%} {max(errors):+.1%}"


def main(
    models: Annotated[str, typer.Option(help="Names, with commas between. Default: all.")] = "",
    scenarios: Annotated[str, typer.Option(help="Names, with commas between. Default: all.")] = "",
    shares: Annotated[str, typer.Option(help="Budgets, as shares of what activations take.")] = "0.8,0.5,0.3",
    strict: Annotated[bool, typer.Option(help="Predictions that are off are failures, too.")] = False,
) -> None:
    """Train under budgets, and meter every step."""
    if not is_metered():
        raise typer.Exit(run_metered(sys.argv[1:]).returncode)

    import torch

    from tests.budgets.models import MODELS
    from tests.budgets.runs import SCENARIOS, budgets

    torch.set_num_threads(1)
    failed = 0
    found: dict[str, list[Outcome]] = {}
    wanted = [float(share) for share in shares.split(",")]
    with tempfile.TemporaryDirectory() as folder:  # one for all: how fast it is, is measured once
        for name in models.split(",") if models else MODELS:
            for scenario in scenarios.split(",") if scenarios else SCENARIOS:
                try:
                    for outcome in budgets(name, SCENARIOS[scenario], wanted, folder):
                        failed += not outcome.is_right(strict)
                        found.setdefault(name, []).append(outcome)
                        typer.echo(f"{name:18} {scenario:16} {outcome}")
                except Exception as error:
                    failed += 1
                    typer.echo(f"{name:18} {scenario:16} {type(error).__name__}: {str(error)[:300]}")
    Console().print(_table(found))
    typer.echo(f"{failed} failed")
    raise typer.Exit(failed > 0)


if __name__ == "__main__":
    typer.run(main)
