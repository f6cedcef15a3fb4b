"""Runs that are killed at random moments: ``python -m tests.faults.killed 200``.

One process imports everything, then forks the runs one after the other, so that a kill costs a moment and hits a run
anywhere: opening files, storing, loading, counting what was written, closing.
"""

import fcntl
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.progress import track
from torch import nn

from hf_offload import OffloadConfig, attach, offload_activations

LONGEST_S = 0.6


def one_step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 64 * 64).reshape(64, 64)).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())])


def streamed_steps(directory: Path | None, params: str = "none") -> list[torch.Tensor]:
    """Weights after steps of an optimizer, whose state and gradients are in files if there is a directory, and is saved.
    Weights are where ``params`` says.
    """
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = OffloadConfig(tier="none")
    if directory is not None:
        config = OffloadConfig(tier="none", params=params, optimizer="ssd", directory=directory, min_bytes=0)
    session = attach(model, config)
    if session.residency is not None:
        session.residency.limit_bytes = 1
    session.prepare_optimizer(optimizer)
    session.defer_updates()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 64 * 64).reshape(64, 64)).square().mean().backward()
        session.clip_grad_norm_(0.1)
        optimizer.step()
    saved = optimizer.state_dict()["state"]
    session.detach()
    return [*(p.detach().clone() for p in model.parameters()), *(saved[place]["exp_avg"] for place in sorted(saved))]


def train(directory: Path, sessions: int) -> bool:
    """Whether steps of that many sessions, one after the other, are right."""
    model = make_model()
    expected, expected_of_optimizer = one_step(model), streamed_steps(None)
    config = OffloadConfig(tier="ssd", directory=directory, min_bytes=0, read_ahead_bytes=1)
    for _ in range(sessions):
        with offload_activations(model, config) as session:
            for _ in range(3):
                found = one_step(model)
                session.end_step()
                if not all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)):
                    return False
        for params in ("none", "ssd"):
            if not all(map(torch.equal, expected_of_optimizer, streamed_steps(directory, params))):
                return False
    return True


def in_child(directory: Path, sessions: int) -> int:
    """Start a run in a process of its own; returns its number."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if train(directory, sessions) else 2
        finally:
            os._exit(code)
    return pid


def left_behind(directory: Path, state: Path, shared: set[str]) -> list[str]:
    """What a run that is gone has left."""
    found = [f"file {path}" for path in directory.iterdir()]
    found += [f"shared memory {name}" for name in shared_memory() - shared]
    for path in (state / "hf_offload" / "drives").glob("*"):
        if path.suffix != ".json":
            found.append(f"file {path}")
            continue
        with path.open("rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(f"lock on {path}")
            line = file.read()
        try:
            if line:  # a file that was made, and not yet written to, counts as none
                json.loads(line)
        except ValueError:
            found.append(f"half a line in {path}: {line!r}")
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
        directory, state = Path(scratch) / "tier", Path(scratch) / "state"
        directory.mkdir()
        state.mkdir()
        os.environ["XDG_STATE_HOME"] = str(state)
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
            problems += [f"run {kill} left {what}" for what in left_behind(directory, state, shared)]
        seconds = time.monotonic() - begin
        last = in_child(directory, 2)
        status = os.waitstatus_to_exitcode(os.waitpid(last, 0)[1])
        if status:
            problems.append(f"the run after them ended with {status}")
        problems += [f"the run after them left {what}" for what in left_behind(directory, state, shared)]
        counted = [json.loads(path.read_bytes())["written_bytes"] for path in state.rglob("*.json")]
    line = f"{done} runs killed in {seconds:.0f} s, {len(problems)} problems"
    sys.stdout.write("\n".join([*problems, f"{line}; counted: {counted} bytes"]) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
