"""What each way to offload changes in a process, next to what ``hf-offload doctor`` says of it."""

import json
import os
import subprocess
import sys

import pytest

from hf_offload.cli.doctor import COMMANDS, EFFECTS

# One process imports what takes longest, and trains once; each way has a fork of it, the first to import the package.
IMPORTS = """
import atexit, json, os, sys, traceback
from pathlib import Path
import torch, transformers, accelerate, transformers.trainer
from accelerate import Accelerator
from transformers import Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from tests.helpers.process_state import differences, state
from tests.helpers.tiny_models import ExampleDataset, tiny_batch, tiny_model
"""
FORKS = """
assert "hf_offload.session" not in sys.modules

def run(folder, code, environment):
    os.chdir(folder)
    os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    sys.path[0] = folder
    sys.argv = ["script_of_way.py", "found.json"]
    os.environ.update(environment)
    try:
        exec(compile(code, "script_of_way.py", "exec"), globals())
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

statuses = []
for given in json.loads(Path("given.json").read_text()):
    if (child := os.fork()) == 0:
        run(*given)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
Path("statuses.json").write_text(json.dumps(statuses))
"""
DEFINITIONS = """
class Look(TrainerCallback):
    def on_init_end(self, *args, **kwargs):
        look()
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == args.max_steps:
            look()

def trainer(arguments, callbacks=(), **settings):
    arguments = arguments(
        output_dir="out", max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", **settings
    )
    data = ExampleDataset("gpt2", 8)
    found = Trainer(tiny_model("gpt2"), arguments, train_dataset=data, callbacks=[*callbacks, Look()])
    found.train()
    found.create_model_card()

def loop(accelerator):
    model = tiny_model("gpt2")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        accelerator.backward(model(**tiny_batch("gpt2")).loss)
        optimizer.step()
        optimizer.zero_grad()
    look()
    accelerator.end_training()

def plain_loop(**settings):
    model = tiny_model("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    with hf_offload.offload_activations(model, hf_offload.OffloadConfig(**settings)) as session:
        optimizer = session.prepare_optimizer(optimizer)
        for _ in range(4):
            model(**tiny_batch("gpt2")).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.end_step()
        look(but={"torch.saved_tensors_hooks"})  # of this thread, in the block

def look(but=frozenset()):
    if before is not None:
        found.update(differences(before, state()) - but)

found, before = set(), None
trainer(TrainingArguments)  # what is loaded on first use is there from now on
loop(Accelerator(cpu=True))
accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
"""
BEGIN = """
SSD = {"tier": "ssd", "directory": os.getcwd(), "min_bytes": 0}
FLAGS = {"offload": "ssd", "offload_directory": os.getcwd(), "offload_min_bytes": "0"}
before = state()
import hf_offload
"""
END = """
look()
with open(sys.argv[-1], "w") as file:
    json.dump(sorted(found), file)
"""
WAYS = {
    "import": "",
    "arguments": "trainer(hf_offload.OffloadTrainingArguments, **FLAGS)",
    "memory mode": "trainer(hf_offload.OffloadTrainingArguments, memory_mode='badam', **FLAGS)",
    "callback": "trainer(TrainingArguments, [hf_offload.OffloadCallback(hf_offload.OffloadConfig(**SSD))])",
    "plugin": "loop(hf_offload.OffloadPlugin(**SSD).accelerator(cpu=True))",
    "plain loop": "plain_loop(**SSD)",
    "optimizer": "plain_loop(tier='none', optimizer='ssd', directory=os.getcwd(), min_bytes=0)",
    "weights": "plain_loop(tier='none', params='ssd', directory=os.getcwd(), min_bytes=0)",
    "auto": "plain_loop(tier='auto', memory_budget='1GiB', directory=os.getcwd())",
    "snapshots": """
model = tiny_model("gpt2")
with hf_offload.attach(model, hf_offload.OffloadConfig(tier="none", snapshot_steps=1)).snapshots("run") as snapshots:
    snapshots.end_step()
""",
    "hf_offload.run": """
from hf_offload.run import main
sys.modules["this_script"] = sys.modules["__main__"]
sys.argv[1:1] = ["-m", "script_with_a_loop"]
before = state()
main()
""",
}
ENVIRONMENT = {"HF_OFFLOAD_TIER": "ssd", "HF_OFFLOAD_DIRECTORY": ".", "HF_OFFLOAD_MIN_BYTES": "0"}


def environment_of(way):
    return ENVIRONMENT if way == "hf_offload.run" else {}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Folder and exit code of each way."""
    place = tmp_path_factory.mktemp("ways")
    (place / "script.py").write_text(IMPORTS + DEFINITIONS + FORKS)
    folders = {way: place / way for way in WAYS}
    for folder in folders.values():
        folder.mkdir()
        (folder / "script_with_a_loop.py").write_text(
            "from this_script import Accelerator, loop\nloop(Accelerator(cpu=True))"
        )
    given = [(str(folder), BEGIN + WAYS[way] + END, environment_of(way)) for way, folder in folders.items()]
    (place / "given.json").write_text(json.dumps(given))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "script.py"], cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(
        zip(WAYS, zip(folders.values(), json.loads((place / "statuses.json").read_text()), strict=True), strict=True)
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("way", WAYS)
def test_doctor_names_what_each_way_changes_and_nothing_else(way, ran):
    folder, status = ran[way]
    assert status == 0, (folder / "log").read_text()
    found = set(json.loads((folder / "found.json").read_text()))
    named = {changed for effect in (*EFFECTS, *COMMANDS) for changed in effect.changes.get(way, ())}
    assert found == named


def test_there_are_few():
    assert len(EFFECTS) <= 3
