"""What a script does after its training may fail: it is started again, and what was trained is not lost, nor trained on."""

import json
import signal
import subprocess
import sys

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_offload.snapshots import client as clients
from tests.faults.killed_snapshots import result_of, same, trainer_in
from tests.helpers.snapshot_loops import STEPS, net, trained
from tests.helpers.snapshot_processes import end, held_by, no_process_is_left_by_the_file, steps_held, until  # noqa: F401  a fixture
from tests.helpers.tiny_models import ExampleDataset

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # which torchdata calls
AT_EXIT = 99
# One process imports what takes longest, and forks: each child ends as an interpreter does, up to the last handler.
SCRIPT = """
import atexit, os
atexit.register(lambda: os._exit(99))
import contextlib, gc, json, os, signal, sys, threading
from pathlib import Path
import torch, transformers
from hf_offload.snapshots import client as clients
from tests.faults.killed_snapshots import trainer_in
from tests.helpers.snapshot_loops import net, trained
torch.set_num_threads(1)

model = None
codes = {}
for name, code in json.loads(Path("cases.json").read_text()).items():
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        break
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
else:
    Path("codes.json").write_text(json.dumps(codes))
    code = ""
    sys.exit()
if name.startswith("trainer"):
    trainer = trainer_in(Path(name), True, max_steps=6, offload_snapshot_steps=4)
    trainer.train()
else:
    model = net()
    trained(Path(name), model=model)
exec(compile(code, name, "exec"))
"""
KEPT = {
    "an error": "raise RuntimeError",
    "trainer, an error": "raise RuntimeError",
    "Ctrl-C": "raise KeyboardInterrupt",
    "a signal": "os.kill(os.getpid(), signal.SIGTERM)",
    "the end of a kernel": "os.kill(os.getpid(), signal.SIGKILL)",
    "an end that is not seen": "os._exit(0)",
    "no model": "del model\ngc.collect()\nraise RuntimeError",
    "an exit code of a launched script": "clients.note_failure()\nsys.exit(3)",
    "an error after a child has ended": "if os.fork() == 0: sys.exit(0)\nos.wait()\nraise RuntimeError",
}
GONE = {
    "its end": "",
    "trainer, its end": "",
    "an exit": "sys.exit()",
    "an exit code that nothing sees": "sys.exit(3)",
    "an error that is caught": "with contextlib.suppress(RuntimeError): raise RuntimeError",
    "another training": "trained(Path('another training, the other'), model=net())\nraise RuntimeError",
}
CODES = {"a signal": -signal.SIGTERM, "the end of a kernel": -signal.SIGKILL, "an end that is not seen": 0}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Trainings of which each has ended well, in processes that have not all done so."""
    folder = tmp_path_factory.mktemp("ends")
    cases = KEPT | GONE
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == AT_EXIT, done.stderr
    expected = dict.fromkeys(cases, AT_EXIT) | CODES
    assert json.loads((folder / "codes.json").read_text()) == expected, (folder / "log").read_text()
    yield folder
    for name in cases:
        end({held["pid"] for held in [held_by(folder / name)] if held is not None})


@pytest.mark.parametrize("name", KEPT)
def test_a_process_that_ends_otherwise_than_well_leaves_the_newest_snapshot_of_a_training_that_is_over(name, ends):
    assert steps_held(ends / name) == [4 if name.startswith("trainer") else STEPS]


@pytest.mark.parametrize("name", GONE)
def test_nothing_is_left_once_a_process_has_ended_well(name, ends):
    until(lambda: held_by(ends / name) is None)


def test_a_loop_that_is_started_again_trains_nothing(ends, tmp_path):
    expected, model = trained(tmp_path)[1], net()
    begun, weights = trained(ends / "an error", model=model, resume=True)
    assert begun == STEPS
    assert same(expected, weights)
    assert steps_held(ends / "an error") == [STEPS]


# -- of a Trainer ----------------------------------------------------------------------------------------------------------


class Steps(TrainerCallback):
    """Notes the steps that are trained; one of ``stop`` ends training."""

    def __init__(self, stop=None):
        self.steps = []
        self._stop = stop

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)
        control.should_training_stop |= state.global_step == self._stop


def trains(folder, *, patience=None, stop=None, resume=False, **settings):
    """Steps that were trained, and what it ends with."""
    noted = Steps(stop)
    callbacks = [noted] if patience is None else [noted, EarlyStoppingCallback(patience)]
    evaluated = ExampleDataset("gpt2", 6, seed=2) if "eval_strategy" in settings else None
    settings = {"max_steps": 10, "logging_steps": 4, "offload_snapshot_steps": 4, **settings}
    trainer = trainer_in(folder, True, callbacks, evaluated=evaluated, **settings)
    trainer.train(resume_from_checkpoint=resume)
    history = [
        {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second"))}
        for entry in trainer.state.log_history
    ]
    return noted.steps, {**result_of(trainer), "history": history, "best": trainer.state.best_metric}


SAVED = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "eval_loss", "learning_rate": 0.3}


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({}, [9, 10]),
        (SAVED, [9, 10]),
        ({"max_steps": -1, "num_train_epochs": 1, "eval_strategy": "epoch"}, [25]),
        ({"max_steps": 8}, [5, 6, 7, 8]),
        ({"patience": 1, "max_steps": 60, "load_best_model_at_end": True, **EVALUATED, **SAVED}, None),
    ],
    ids=["in an epoch", "checkpoints", "epochs", "on a snapshot", "stopped by its results"],
)
def test_a_trainer_that_is_started_again_after_its_end_trains_its_last_steps_again(tmp_path, settings, again):
    steps, expected = trains(tmp_path / "run", **settings)
    for _ in range(2):  # it may fail more than once
        found_steps, found = trains(tmp_path / "run", resume=True, **settings)
        assert found_steps == (again or steps[-len(found_steps) :])
        assert len(found_steps) <= 4
        for name in expected:
            assert same(expected[name], found[name]), name
    clients.release()
    assert held_by(tmp_path / "run") is None


def test_a_training_that_a_callback_has_stopped_goes_on_and_one_of_more_steps(tmp_path):
    """For want of time, as far as is known."""
    expected = trains(tmp_path / "whole", max_steps=12)[1]
    assert trains(tmp_path / "run", stop=6, max_steps=12)[0][-1] == 6
    steps, found = trains(tmp_path / "run", resume=True, max_steps=12)
    assert steps == [*range(5, 13)]
    assert same(expected, found)
    assert trains(tmp_path / "run", resume=True, max_steps=14)[0] == [*range(9, 15)]
