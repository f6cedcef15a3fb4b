"""Budgets of many architectures, metered from outside: ``python -m tests.budgets --models opt,vit --scenarios plain``.

Prints a line a run: the most that any step after the first had alive, as a share of the budget, and what was predicted.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).parent
METERED = "TESTS_BUDGETS_METERED"


def build_meter(folder: Path) -> Path:
    """The preloaded counter, compiled."""
    library = folder / "meter.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, HERE / "meter.c", "-ldl"], check=True)
    return library


def run_metered(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """This program in a process of its own, whose allocations are counted."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "LD_PRELOAD": str(build_meter(Path(folder))),
            "HF_HUB_OFFLINE": "1",
            METERED: "1",
        }
        command = [sys.executable, "-W", "ignore", "-m", "tests.budgets", *arguments]
        return subprocess.run(command, env=environment, cwd=HERE.parents[1], check=False, stdout=sys.stdout, text=True)


def main(
    models: Annotated[str, typer.Option(help="Names, with commas between. Default: all.")] = "",
    scenarios: Annotated[str, typer.Option(help="Names, with commas between. Default: all.")] = "",
    shares: Annotated[str, typer.Option(help="Budgets, as shares of what activations take.")] = "0.8,0.5,0.3",
    strict: Annotated[bool, typer.Option(help="Predictions that are off are failures, too.")] = False,
) -> None:
    """Train under budgets, and meter every step."""
    if METERED not in os.environ:
        raise typer.Exit(run_metered(sys.argv[1:]).returncode)

    import torch

    from tests.budgets.models import MODELS
    from tests.budgets.runs import SCENARIOS, budgets

    torch.set_num_threads(1)
    failed = 0
    wanted = [float(share) for share in shares.split(",")]
    with tempfile.TemporaryDirectory() as folder:  # one for all: how fast it is, is measured once
        for name in models.split(",") if models else MODELS:
            for scenario in scenarios.split(",") if scenarios else SCENARIOS:
                try:
                    for outcome in budgets(name, SCENARIOS[scenario], wanted, folder):
                        failed += not outcome.is_right(strict)
                        typer.echo(f"{name:18} {scenario:16} {outcome}")
                except Exception as error:
                    failed += 1
                    typer.echo(f"{name:18} {scenario:16} {type(error).__name__}: {str(error)[:300]}")
    typer.echo(f"{failed} failed")
    raise typer.Exit(failed > 0)


if __name__ == "__main__":
    typer.run(main)
