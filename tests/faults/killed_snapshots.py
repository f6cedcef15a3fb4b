"""Trainings with snapshots that are killed at random moments: ``python -m tests.faults.killed_snapshots 200``, with a seed
and what trains: ``trainer``, ``loop``, ``drive``, a trainer whose optimizer state is on a drive, or ``weights``, one whose
weights are there, too.

One process imports everything and forks trainings one after the other. Each goes on from the snapshot of the one before,
until it is killed: the trainer, its snapshot process, or both. A training that comes to its end must have the bits of one
that never stopped, and no start may have lost more steps than lie between two snapshots.
"""

import contextlib
import itertools
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from rich.progress import track
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainerCallback, default_data_collator
from transformers.utils import logging as transformers_logging

from hf_offload import OffloadConfig, OffloadTrainingArguments, attach
from tests.faults.killed import shared_memory
from tests.helpers.snapshot_processes import held_by
from tests.helpers.tiny_models import ExampleDataset, tiny_model

EVERY = 4
STEPS = 90
LONGEST_S = 1.2
WAIT_S = 900
"""Longer than a machine may stop these processes: one that waits for the next training ends after it."""
TARGETS = ("trainer", "snapshot process", "both")
ARGUMENTS = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 3,
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "seed": 3, "dataloader_pin_memory": False,
}  # fmt: skip


class Progress(TrainerCallback):
    """Notes the step where a training began, and each that it has ended."""

    def __init__(self, path: Path):
        self._path = path
        self._begin = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self.note(state.global_step)

    def begin(self, step):
        self._begin = step
        self.note(step)

    def note(self, step):
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps([self._begin, step]))
        unfinished.rename(self._path)


def trainer_in(folder: Path, snapshots: bool, callbacks=(), model="gpt2", evaluated=None, kind=Trainer, **others):
    """A training of a tiny model with dropout, over several epochs."""
    settings = {"offload_snapshot_steps": EVERY, "offload_snapshot_wait_s": WAIT_S} if snapshots else {}
    args = OffloadTrainingArguments(output_dir=str(folder), **{**ARGUMENTS, **settings, **others})
    data = ExampleDataset(model if isinstance(model, str) else "gpt2", 50, seed=1)
    built = tiny_model(model, dropout=0.1) if isinstance(model, str) else model
    return kind(model=built, args=args, train_dataset=data, eval_dataset=evaluated, callbacks=list(callbacks))


def trained_in_loop(folder: Path, snapshots: bool, progress: "Progress | None" = None, **settings) -> dict:
    """The same in a loop of its own."""
    torch.manual_seed(3)
    model = tiny_model("gpt2", dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    data = ExampleDataset("gpt2", 50, seed=1)
    loader = StatefulDataLoader(data, batch_size=2, shuffle=True, collate_fn=default_data_collator)
    losses = []

    def train(epochs, batches_of, step, end_step):
        for _ in epochs:
            for batch in batches_of(loader):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                losses.append(loss.item())
                end_step(step)
                if step == STEPS:
                    return

    if not snapshots:
        train(itertools.count(), iter, 0, lambda step: None)
    else:
        session = attach(model, OffloadConfig(tier="none", snapshot_steps=EVERY, snapshot_wait_s=WAIT_S, **settings))
        with session.snapshots(folder, optimizer=optimizer, scheduler=scheduler, resume=True) as taken:
            progress.begin(taken.step)

            def end_step(step):
                taken.end_step()
                progress.note(step)

            train(itertools.count(taken.epoch), taken.batches, taken.step, end_step)
        session.detach()
    return {
        "weights": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": scheduler.state_dict(),
        "last loss": losses[-1],
        "generators": torch.get_rng_state(),
    }


def result_of(trainer: Trainer) -> dict:
    """Weights, optimizer state, schedule, the losses that were logged, and their mean."""
    return {
        "weights": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "losses": [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry],
        "mean loss": trainer.state.log_history[-1]["train_loss"],
        "generators": torch.get_rng_state(),
    }


def same(one, other) -> bool:
    """Whether all of it is, to the last bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def in_child(folder: Path, directory: Path | None, kind: str) -> int:
    """Start a training in a process of its own; returns its number."""
    (folder / "progress").unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            noted = Progress(folder / "progress")
            others = {} if directory is None else {"snapshot_dir": str(directory)}
            if kind == "loop":
                result = trained_in_loop(folder / "run", True, noted, **others)
            else:
                if kind in ("drive", "weights"):
                    others |= {"optimizer": "ssd", "directory": str(folder), "min_bytes": "0"}
                if kind == "weights":
                    others |= {"params": "ssd"}
                others = {f"offload_{name}": value for name, value in others.items()}
                trainer = trainer_in(folder / "run", True, [noted], **others)
                trainer.train(resume_from_checkpoint=True)
                result = result_of(trainer)
            torch.save(result, folder / "result")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def problems_of(folder: Path, code: int, wanted: dict) -> list[str]:
    """What is wrong with the end of a training, with what it has printed last."""
    if code:
        return [f"it ended with {code} and printed:\n{(folder / 'output').read_text()[-4000:]}"]
    found = torch.load(folder / "result", weights_only=False)
    return [
        f"its {name} are not those of one that never stopped" for name in wanted if not same(wanted[name], found[name])
    ]


def progress(folder: Path) -> tuple[int, int] | None:
    """Where the training began, and how many steps it has ended; None if it has not begun."""
    try:
        begin, last = json.loads((folder / "progress").read_text())
    except FileNotFoundError:
        return None
    return begin, last


def wait_for_another(folder: Path, pid: int, killed: int) -> None:
    """Until the training has another snapshot process than the ``killed`` one, with a snapshot; or has ended."""
    begin = time.monotonic()
    while time.monotonic() < begin + 60:
        held = held_by(folder / "run")
        if held is not None and held["pid"] != killed and held["snapshots"]:
            return
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.005)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main(count: int, seed: int = 0, kind: str = "trainer") -> int:
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    logging.getLogger("hf_offload").setLevel(logging.ERROR)
    chance = random.Random(seed)
    problems, completed, kills, lost_most = [], 0, dict.fromkeys(TARGETS, 0), 0
    shared = shared_memory()
    with tempfile.TemporaryDirectory(prefix="hf_offload-killed-") as scratch:
        if kind == "loop":
            wanted = trained_in_loop(Path(scratch) / "whole", False)
        else:
            expected = trainer_in(Path(scratch) / "whole", False)
            expected.train()
            wanted = result_of(expected)
        begin, folder, number = time.monotonic(), Path(scratch) / "0", 0
        folder.mkdir()
        reached, forgiven = 0, False
        for _ in track(range(count), description="killing trainings", disable=not sys.stderr.isatty()):
            on_disk = number % 2 == 1
            while True:
                pid = in_child(folder, folder / "disk" if on_disk else None, kind)
                time.sleep(chance.uniform(0.05, LONGEST_S))
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    break
                code = os.waitstatus_to_exitcode(status)
                problems += [f"training {number}: {each}" for each in problems_of(folder, code, wanted)]
                time.sleep(0.05)
                if held_by(folder / "run") is not None:
                    problems.append(f"training {number} left its snapshot process")
                completed, number, reached, forgiven = completed + 1, number + 1, 0, False
                folder, on_disk = Path(scratch) / str(number), number % 2 == 1
                folder.mkdir()
            target = chance.choice(TARGETS)
            kills[target] += 1
            held = held_by(folder / "run") if target != "trainer" else None
            if held is not None:
                # Until a training has begun, the process alone has what it resumes from.
                forgiven = forgiven or progress(folder) is None
                kill(held["pid"])
            if held is not None and target == "snapshot process":  # the trainer goes on, and has another one started
                wait_for_another(folder, pid, held["pid"])
                time.sleep(chance.uniform(0.0, LONGEST_S / 4))
            kill(pid)
            os.waitpid(pid, 0)
            found = progress(folder)
            if found is not None:
                began, last = found
                lost = max(0, reached - began)
                if not forgiven:
                    lost_most = max(lost_most, lost)
                if lost > EVERY and not forgiven:
                    problems.append(f"training {number} began at step {began} after step {reached} was reached")
                # At its end, a training lets its snapshots go.
                reached, forgiven = last, last == STEPS
            # Both at once: what is on disk may be one or two snapshots older, and in memory there is nothing.
            forgiven = forgiven or target == "both"
        pid = in_child(folder, folder / "disk" if on_disk else None, kind)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        problems += [f"the last training: {each}" for each in problems_of(folder, code, wanted)]
        time.sleep(0.05)
        if held_by(folder / "run") is not None:
            problems.append("the last training left its snapshot process")
        seconds = time.monotonic() - begin
        completed += 1
    problems += [f"shared memory {name} was left" for name in shared_memory() - shared]
    listed = ", ".join(f"{number} of {target}" for target, number in kills.items())
    line = f"{count} kills ({listed}) in {seconds:.0f} s, {completed} trainings completed, {len(problems)} problems"
    sys.stdout.write("\n".join([*problems, f"{line}; most steps lost: {lost_most}"]) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3] or [200]), *sys.argv[3:4]))
