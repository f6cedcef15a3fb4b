"""What a script does after its training may fail: it is started again, and what was trained is not lost, nor trained on."""

import json
import signal
import subprocess
import sys

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_offload.snapshots import retained
from tests.faults.killed_snapshots import held_by, result_of, same, trainer_in
from tests.helpers.snapshot_loops import STEPS, net, trained
from tests.helpers.snapshot_processes import end, no_process_is_left_by_the_file, until  # noqa: F401  a fixture
from tests.helpers.tiny_models import ExampleDataset

AT_EXIT = 99
# One process imports what takes longest, and forks: each child ends as an interpreter does, up to the last handler.
SCRIPT = """
import atexit, os
atexit.register(lambda: os._exit(99))
import contextlib, gc, json, os, signal, sys, threading
from pathlib import Path
import torch, transformers
from hf_offload.snapshots import retained
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
    "an exit code of a launched script": "retained.note_exit(3)\nsys.exit(3)",
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


def steps_held(folder):
    held = held_by(folder)
    return None if held is None else [each["step"] for each in held["snapshots"]]


@pytest.mark.parametrize("name", KEPT)
def test_a_process_that_ends_otherwise_than_well_leaves_the_newest_snapshot_of_a_training_that_is_over(name, ends):
    assert steps_held(ends / name) == [6 if name.startswith("trainer") else STEPS]


@pytest.mark.parametrize("name", GONE)
def test_nothing_is_left_once_a_process_has_ended_well(name, ends):
    until(lambda: held_by(ends / name) is None)


def test_a_loop_that_is_started_again_trains_nothing(ends, tmp_path):
    expected, model = trained(tmp_path)[1], net()
    begun, weights = trained(ends / "an error", model=model, resume=True)
    assert begun == STEPS
    assert same(expected, weights)
    assert steps_held(ends / "an error") == [STEPS]


@pytest.mark.parametrize(("leave", "kept"), [(6, 4), (7, 6)])
def test_a_loop_that_leaves_its_data_before_their_end_goes_on_to_that_step(tmp_path, leave, kept):
    """Nothing says that it would leave them before another step."""
    model, settings = net(), {"snapshot_dir": str(tmp_path / "disk")}
    begun, weights = trained(tmp_path / "run", leave=leave, model=model, **settings)
    assert begun == 0
    until(lambda: steps_held(tmp_path / "run") == [kept])
    begun, found = trained(tmp_path / "run", leave=leave, resume=True, **settings)
    assert begun == kept
    assert same(weights, found)


# -- of a Trainer ----------------------------------------------------------------------------------------------------------

EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "eval_loss", "learning_rate": 0.3}
SAVED = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1}


alive = []
"""Models that are still needed."""


@pytest.fixture(autouse=True)
def models():
    yield
    alive.clear()
    retained.release()


class Counts(TrainerCallback):
    """Ends of steps; one of ``stop`` ends training."""

    def __init__(self, stop=None):
        self.steps = []
        self._stop = stop

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)
        control.should_training_stop |= state.global_step == self._stop


def trains(folder, *, patience=None, stop=None, resume=False, **settings):
    """Steps that were trained, and what it ends with."""
    counts = Counts(stop)
    callbacks = [counts] if patience is None else [counts, EarlyStoppingCallback(patience)]
    evaluated = ExampleDataset("gpt2", 6, seed=2) if "eval_strategy" in settings else None
    settings = {"max_steps": 10, "logging_steps": 4, "offload_snapshot_steps": 4, **settings}
    trainer = trainer_in(folder, True, callbacks, evaluated=evaluated, **settings)
    trainer.train(resume_from_checkpoint=resume)
    alive.append(trainer.model)
    history = [
        {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second"))}
        for entry in trainer.state.log_history
    ]
    return counts.steps, {**result_of(trainer), "history": history, "best": trainer.state.best_metric}


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({}, 10),
        ({"max_steps": 8, **SAVED}, 8),
        ({"max_steps": -1, "num_train_epochs": 1, "eval_strategy": "epoch"}, 25),
        ({"max_steps": 3}, 3),
        ({"offload_optimizer": "ssd", "offload_params": "ssd", "offload_min_bytes": "0"}, 10),
    ],
    ids=["in an epoch", "checkpoints", "epochs", "a short one", "a drive"],
)
def test_a_trainer_that_is_started_again_after_its_end_trains_nothing(tmp_path, settings, last):
    if "offload_params" in settings:
        settings = {**settings, "offload_directory": str(tmp_path)}
    steps, expected = trains(tmp_path / "run", **settings)
    assert steps[-1] == last
    assert steps_held(tmp_path / "run") == [steps[-1]]
    for _ in range(2):  # it may fail more than once
        again, found = trains(tmp_path / "run", resume=True, **settings)
        assert again == []
        for name in expected:
            assert same(expected[name], found[name]), name
    retained.release()
    assert held_by(tmp_path / "run") is None


def test_the_end_of_a_training_is_one_of_its_snapshots_on_disk(tmp_path):
    settings = {"offload_snapshot_dir": str(tmp_path / "disk")}
    _, expected = trains(tmp_path / "run", **settings)
    until(lambda: (tmp_path / "disk" / "checkpoint-10").exists())
    end({held_by(tmp_path / "run")["pid"]})
    steps, found = trains(tmp_path / "run", resume=True, **settings)
    assert steps == []
    assert same(expected, found)


def test_a_training_of_more_steps_goes_on_behind_its_end(tmp_path):
    trains(tmp_path / "run")
    assert trains(tmp_path / "run", resume=True, max_steps=12)[0] == [11, 12]


def test_a_training_that_a_callback_has_stopped_goes_on(tmp_path):
    """For want of time, as far as is known."""
    expected = trains(tmp_path / "whole")[1]
    assert trains(tmp_path / "run", stop=6)[0][-1] == 6
    steps, found = trains(tmp_path / "run", resume=True)
    assert steps == [5, 6, 7, 8, 9, 10]
    assert same(expected, found)


def test_a_training_that_its_results_have_stopped_stops_there_again(tmp_path):
    settings = {"patience": 1, "max_steps": 60, "load_best_model_at_end": True, **EVALUATED, **SAVED}
    steps, expected = trains(tmp_path / "run", **settings)
    assert steps[-1] < settings["max_steps"]
    again, found = trains(tmp_path / "run", resume=True, **settings)
    assert again == steps[-len(again) :]
    assert len(again) <= 4
    for name in expected:
        assert same(expected[name], found[name]), name


def test_a_checkpoint_of_the_last_step_is_not_trained_on_either(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 5}
    expected = trains(tmp_path / "run", **settings)[1]
    end({held_by(tmp_path / "run")["pid"]})
    steps, found = trains(tmp_path / "run", resume=True, **settings)
    assert steps == []
    assert same(expected["weights"], found["weights"])
