"""Unmodified scripts in processes of their own: hf_offload.run, hf-offload launch, and plain accelerate launch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hf_offload

ROOT = Path(hf_offload.__file__).resolve().parent.parent
SCRIPT = r"""
import sys
import torch
from accelerate import Accelerator
from tests.helpers.tiny_models import tiny_batch, tiny_model

accelerator = Accelerator()
torch.manual_seed(accelerator.process_index)
model = tiny_model("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(3):
    loss = model(**tiny_batch("gpt2", seed=step + 10 * accelerator.process_index)).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    who = f"{accelerator.process_index} of {accelerator.num_processes}"
    sys.stdout.write(f"{who}: {loss.item().hex()} {sys.argv[1:]} {__name__}\n")  # at once: two processes write
    sys.stdout.flush()
if accelerator.num_processes > 1:
    torch.distributed.barrier()
"""
# A file for accelerate: two processes that talk over gloo, started as on two GPUs.
CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "num_processes": 2,
    "num_machines": 1,
    "machine_rank": 0,
    "mixed_precision": "no",
    "use_cpu": True,
    "main_process_port": 0,
}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tier").mkdir()
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(CONFIG))
    section = {"tier": "ssd", "directory": str(tmp_path / "tier"), "min_bytes": 0}
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(CONFIG | {"hf_offload_config": section}))
    return tmp_path


def run(place, *command, **variables):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "COLUMNS": "200",
        "HF_HOME": str(place / "home"),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *command], cwd=place, env=environment | variables, capture_output=True, text=True
    )


def printed(done):
    return sorted(line for line in done.stdout.splitlines() if " of " in line and "0x" in line)


ACCELERATE = ("-m", "accelerate.commands.accelerate_cli", "launch")
OFFLOADED = "of activations moved a step"


def test_three_ways_to_launch_two_processes(place):
    """All print the same losses, to the last bit; two of them only with offloading on."""
    plain = run(place, *ACCELERATE, "--config_file", "plain.yaml", "train.py", "--a", "b")
    assert plain.returncode == 0, plain.stderr
    expected = printed(plain)
    assert len(expected) == 6
    assert OFFLOADED not in plain.stderr

    by_variables = run(
        place, *ACCELERATE, "--config_file", "plain.yaml", "-m", "hf_offload.run", "train.py", "--a", "b",
        HF_OFFLOAD_DIRECTORY=str(place / "tier"), HF_OFFLOAD_MIN_BYTES="0",
    )  # fmt: skip
    ours = run(place, "-m", "hf_offload", "launch", "--config_file", "ours.yaml", "train.py", "--a", "b")
    opted_in = run(
        place, *ACCELERATE, "--config_file", "ours.yaml", "train.py", "--a", "b", HF_OFFLOAD_AUTOLOAD="1"
    )  # fmt: skip
    for done in (by_variables, ours, opted_in):
        assert done.returncode == 0, done.stderr
        assert printed(done) == expected
        assert done.stderr.count(OFFLOADED) == 1  # one summary for both
    assert "by 2 processes" in ours.stderr
    assert list((place / "tier").iterdir()) == []

    refused = run(place, *ACCELERATE, "--config_file", "ours.yaml", "train.py")
    assert refused.returncode != 0
    assert "unknown keys (['hf_offload_config'])" in refused.stderr


def offload(place, *command, **variables):
    return run(place, "-m", "hf_offload.run", *command, HF_OFFLOAD_DIRECTORY=str(place / "tier"), **variables)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the script prints without us."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    return printed(run(folder, "train.py", "--x"))


def test_a_script_alone(place, alone):
    done = offload(place, "train.py", "--x", HF_OFFLOAD_MIN_BYTES="0")
    assert done.returncode == 0, done.stderr
    assert printed(done) == alone
    assert "['--x'] __main__" in done.stdout
    assert done.stderr.count(OFFLOADED) == 1


def test_switched_on_in_two_ways_is_switched_on_once(place):
    done = offload(place, "train.py", HF_OFFLOAD_MIN_BYTES="0", HF_OFFLOAD_AUTOLOAD="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(OFFLOADED) == 1
    assert "Nothing was offloaded" not in done.stderr
    assert "could not be loaded" not in done.stderr


def test_a_module_alone(place, alone):
    assert printed(offload(place, "-m", "train", "--x")) == alone


def test_a_command_inside_shows_every_line_once(place):
    (place / "twice.py").write_text(
        "import logging\nfrom hf_offload.cli.console import visible_log\n"
        "with visible_log():\n    logging.getLogger('hf_offload').info('said so')\n"
    )
    assert offload(place, "twice.py").stderr.count("said so") == 1


def test_scripts_end_as_they_would(place):
    (place / "code.py").write_text("import sys; sys.exit(7)")
    assert offload(place, "code.py").returncode == 7
    (place / "error.py").write_text("import missing_module")
    failed = offload(place, "error.py")
    assert failed.returncode == 1
    assert "ModuleNotFoundError: No module named 'missing_module'" in failed.stderr
    assert "Nothing was offloaded" not in failed.stderr
    launched = run(place, "-m", "hf_offload", "launch", "code.py")
    assert launched.returncode == 7
    assert "Traceback" not in launched.stderr


def test_a_script_that_prepares_nothing_is_told(place):
    (place / "plain.py").write_text("print('done')")
    done = offload(place, "plain.py")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "Nothing was offloaded: plain.py prepared no model" in done.stderr


@pytest.mark.parametrize(
    ("command", "variables", "part"),
    [
        ((), {}, "nothing to run"),
        (("nowhere.py",), {}, "There is no script 'nowhere.py'"),
        (("train.py",), {"HF_OFFLOAD_TIER": "tape"}, "HF_OFFLOAD_TIER='tape' is unknown"),
    ],
)
def test_mistakes_are_told_before_anything_runs(command, variables, part, place):
    done = offload(place, *command, **variables)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("section", "variables", "part"),
    [
        ({"tier": "tape"}, {}, "the config file, section hf_offload_config: tier='tape' is unknown"),
        pytest.param(
            {"tier": "ram"}, {"HF_OFFLOAD_VERIFI": "off"}, "Did you mean 'HF_OFFLOAD_VERIFY'?", marks=pytest.mark.full
        ),
        pytest.param(None, {"HF_OFFLOAD_TIER": "tape"}, "HF_OFFLOAD_TIER='tape' is unknown", marks=pytest.mark.full),
        (None, {"HF_OFFLOAD_AUTOLOAD": "ture"}, "HF_OFFLOAD_AUTOLOAD='ture' is neither on nor off"),
    ],
)
def test_wrong_settings_of_a_plain_launch_are_one_message(place, section, variables, part):
    config = (
        CONFIG | {"distributed_type": "NO", "num_processes": 1} | ({"hf_offload_config": section} if section else {})
    )
    (place / "wrong.yaml").write_text(yaml.safe_dump(config))
    (place / "begins.py").write_text("from accelerate import Accelerator\nAccelerator()\nprint('reached')")
    done = run(
        place, *ACCELERATE, "--config_file", "wrong.yaml", "begins.py", **{"HF_OFFLOAD_AUTOLOAD": "1"} | variables
    )
    assert done.returncode != 0
    assert "reached" not in done.stdout
    message, *rest = done.stderr.splitlines()
    assert message.startswith("hf_offload, which HF_OFFLOAD_AUTOLOAD switches on: ")
    assert part in message
    assert not any("hf_offload/" in line for line in rest)  # what follows is accelerate's, on a script that failed


def test_help(place):
    assert "python -m hf_offload.run train.py" in run(place, "-m", "hf_offload.run", "--help").stdout


def test_torch_is_imported_whatever_is_wrong_with_us(place):
    """What PyTorch calls at the end of its import must not fail, and without the variable does not even look."""
    code = "import torch, sys; print('hf_offload.settings' in sys.modules)"
    assert run(place, "-c", code).stdout == "False\n"
    broken = "import sys; from hf_offload.autoload import start; sys.meta_path = (); start(); print('still here')"
    assert "still here" in run(place, "-c", broken, HF_OFFLOAD_AUTOLOAD="1").stdout
