"""Budgets of many architectures, metered from outside: ``python -m tests.budgets [--models a,b] [--scenarios c,d]``.

Prints a line a run: the most that any step after the first had alive, as a share of the budget, and what was predicted.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def build_meter(folder: Path) -> Path:
    """The preloaded counter, compiled."""
    library = folder / "meter.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, HERE / "meter.c", "-ldl"], check=True)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="")
    parser.add_argument("--scenarios", default="")
    parser.add_argument("--shares", default="0.8,0.5,0.3")
    parser.add_argument("--metered", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.metered:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {
                "LD_PRELOAD": str(build_meter(Path(folder))),
                "PYTHONPATH": os.pathsep.join(
                    [str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
                ),
                "HF_HUB_OFFLINE": "1",
            }
            command = [sys.executable, "-W", "ignore", "-m", "budgets", "--metered", *sys.argv[1:]]
            return subprocess.run(command, env=environment, check=False).returncode

    import torch

    from budgets.models import MODELS
    from budgets.runs import SCENARIOS, budgets

    torch.set_num_threads(1)
    failed = 0
    shares = [float(share) for share in options.shares.split(",")]
    for name in options.models.split(",") if options.models else MODELS:
        for scenario in options.scenarios.split(",") if options.scenarios else SCENARIOS:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    for share, budget, keep, run in budgets(name, SCENARIOS[scenario], shares, folder):
                        same = run.losses == keep.losses and all(map(torch.equal, run.weights, keep.weights))
                        over = max(run.peaks[1:]) / budget
                        bad = over > 1 or not same
                        failed += bad
                        print(
                            f"{'FAIL' if bad else 'ok  '} {name:18} {scenario:16} {share:.1f} budget {budget / 2**20:6.1f} MiB"
                            f"  keep {max(keep.peaks[1:]) / budget:.2f}  worst {over:.3f}"
                            f"  predicted/last {(run.predicted or 0) / run.peaks[-1]:.3f}"
                            f"  {'same' if same else 'DIFFERENT'}  {[round(peak / budget, 3) for peak in run.peaks]} {run.placed}",
                            flush=True,
                        )
                except Exception as error:
                    failed += 1
                    print(f"FAIL {name:18} {scenario:16} {type(error).__name__}: {str(error)[:300]}", flush=True)
                    if os.environ.get("TRACE"):
                        raise
    print(f"{failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
