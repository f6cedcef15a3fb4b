"""Runs that are killed at random moments: ``python -m tests.faults.killed 200``.

One process imports everything, then forks the runs one after the other, so that a kill costs a moment and hits a run
anywhere: opening files, storing, loading, counting what was written, closing.
"""

import itertools
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from tests.helpers.train import Run, adamw, mlp, same, train

LONGEST_S = 0.6


def trained(place: str, directory: Path | None, **settings: Any) -> list[Any]:
    """What steps compute whose activations, weights, gradients and state are where the settings say."""
    run, model = Run(place, directory, min_bytes=0, **settings), mlp()
    optimizer = adamw(run, model)
    train(run, model, optimizer, before=lambda _: run.log(run.clip(model, 0.1)))
    run.log_all(model, optimizer)
    for session in run.sessions:
        session.detach()
    return run.logged


def train_right(directory: Path, sessions: int) -> bool:
    """Whether steps of that many sessions, one after the other, are right."""
    expected = trained("none", None)
    kinds = itertools.cycle(("none", "ssd"))
    settings = {"tier": "ssd", "read_ahead_bytes": 1}
    return all(same(expected, trained("ssd", directory, params=next(kinds), **settings)) for _ in range(2 * sessions))


def in_child(directory: Path, sessions: int) -> int:
    """Start a run in a process of its own; returns its number."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if train_right(directory, sessions) else 2
        finally:
            os._exit(code)
    return pid


def left_behind(directory: Path, shared: set[str]) -> list[str]:
    """What a run that is gone has left."""
    found = [f"file {path}" for path in directory.iterdir()]
    found += [f"shared memory {name}" for name in shared_memory() - shared]
    return found


def shared_memory() -> set[str]:
    """Names of what this user has there; tests of tiers that run beside this use it as a disk."""
    user = os.geteuid()
    found = {path.name for path in Path("/dev/shm").iterdir() if path.exists() and path.stat().st_uid == user}
    return {name for name in found if not name.startswith("hf_offload-test-")}


def main(count: int, seed: int = 0) -> int:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    problems = []
    with tempfile.TemporaryDirectory(prefix="hf_offload-killed-") as scratch:
        directory = Path(scratch) / "tier"
        directory.mkdir()
        shared = shared_memory()
        begin = time.monotonic()
        done = 0
        for kill in track(range(count), description="killing runs", disable=not sys.stderr.isatty()):
            pid = in_child(directory, 1 << 30)
            try:
                time.sleep(chance.uniform(0, LONGEST_S))
            except KeyboardInterrupt:  # tell what was done until then
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            done += 1
            os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status != -signal.SIGKILL:
                problems.append(f"run {kill} had ended with {status}")
            problems += [f"run {kill} left {what}" for what in left_behind(directory, shared)]
        seconds = time.monotonic() - begin
        last = in_child(directory, 2)
        status = os.waitstatus_to_exitcode(os.waitpid(last, 0)[1])
        if status:
            problems.append(f"the run after them ended with {status}")
        problems += [f"the run after them left {what}" for what in left_behind(directory, shared)]
    line = f"{done} runs killed in {seconds:.0f} s, {len(problems)} problems"
    sys.stdout.write("\n".join([*problems, line]) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
