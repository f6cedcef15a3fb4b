"""Unmodified scripts in processes of their own: hf_offload.run, hf-offload launch, and plain accelerate launch."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from hf_offload.autoload import start
from hf_offload.run import main
from tests.helpers.loaded_processes import run_python

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
ONE = CONFIG | {"distributed_type": "NO", "num_processes": 1}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tier").mkdir()
    write_configs(tmp_path, CONFIG)
    return tmp_path


def write_configs(folder, config):
    (folder / "plain.yaml").write_text(yaml.safe_dump(config))
    section = {"tier": "ssd", "directory": str(folder / "tier"), "min_bytes": 0}
    (folder / "ours.yaml").write_text(yaml.safe_dump(config | {"hf_offload_config": section}))


def run(place, *command, by=subprocess.run, **variables):
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HOME": str(place / "home"),
    }  # fmt: skip
    return by([sys.executable, *command], cwd=place, env=environment | variables, capture_output=True, text=True)


def printed(done):
    return sorted(line for line in done.stdout.splitlines() if " of " in line and "0x" in line)


ACCELERATE = ("-m", "accelerate.commands.accelerate_cli", "launch")
OFFLOADED = "of activations moved a step"


def test_two_processes_are_launched(place):
    """They print the same losses, to the last bit, as without offloading."""
    plain = run(place, *ACCELERATE, "--config_file", "plain.yaml", "train.py", "--a", "b")
    assert plain.returncode == 0, plain.stderr
    assert len(printed(plain)) == 6
    assert OFFLOADED not in plain.stderr
    ours = run(place, "-m", "hf_offload", "launch", "--config_file", "ours.yaml", "train.py", "--a", "b")
    assert ours.returncode == 0, ours.stderr
    assert printed(ours) == printed(plain)
    assert ours.stderr.count(OFFLOADED) == 1  # one summary for both
    assert "by 2 processes" in ours.stderr
    assert list((place / "tier").iterdir()) == []


def check_launched(place, done, expected):
    assert done.returncode == 0, done.stderr
    assert printed(done) == expected
    assert done.stderr.count(OFFLOADED) == 1
    assert list((place / "tier").iterdir()) == []


def offload(place, *command, by=run_python, **variables):
    directory = str(place / "tier")
    return run(place, "-m", "hf_offload.run", *command, by=by, HF_OFFLOAD_DIRECTORY=directory, **variables)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the script prints without us."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    return printed(run(folder, "train.py", "--x", by=run_python))


def test_a_script_alone(place, alone):
    done = offload(place, "train.py", "--x", HF_OFFLOAD_MIN_BYTES="0")
    assert done.returncode == 0, done.stderr
    assert printed(done) == alone
    assert "['--x'] __main__" in done.stdout
    assert done.stderr.count(OFFLOADED) == 1


def test_weights_of_a_launched_script_leave_memory(place, alone):
    """By a section of its configuration, and a variable."""
    section = {"tier": "none", "optimizer": "ssd", "directory": str(place / "tier"), "min_bytes": 0}
    (place / "weights.yaml").write_text(yaml.safe_dump(ONE | {"hf_offload_config": section}))
    done = run(
        place, "-m", "hf_offload", "launch", "--config_file", "weights.yaml", "train.py", "--x", HF_OFFLOAD_PARAMS="ssd"
    )
    assert done.returncode == 0, done.stderr
    assert printed(done) == alone
    (line,) = [line for line in done.stderr.splitlines() if "Weights: " in line]
    assert re.search(r"Weights: [\d.]+ KiB on ssd, at most .* in memory at once; .* read and .* written", line)
    assert "Optimizer state: " in done.stderr
    assert list((place / "tier").iterdir()) == []


def test_a_module_that_is_launched_in_all_ways_at_once_is_offloaded_once(place, alone):
    write_configs(place, ONE)
    command = (*ACCELERATE, "--config_file", "ours.yaml", "-m", "hf_offload.run", "-m", "train", "--x")
    check_launched(place, run(place, *command, HF_OFFLOAD_AUTOLOAD="1"), alone)


def test_scripts_end_as_they_would(place):
    (place / "code.py").write_text("import sys; sys.exit(7)")
    (place / "error.py").write_text("import missing_module")
    failed = offload(place, "error.py")
    assert failed.returncode == 1
    assert "ModuleNotFoundError: No module named 'missing_module'" in failed.stderr
    assert "Nothing was offloaded" not in failed.stderr
    launched = run(place, "-m", "hf_offload", "launch", "code.py")
    assert launched.returncode == 7
    assert "Traceback" not in launched.stderr


def test_a_script_that_prepares_nothing_is_told_and_its_log_shows_every_line_once(place):
    (place / "plain.py").write_text(
        "import logging\nfrom hf_offload.cli.console import visible_log\n"
        "with visible_log():\n    logging.getLogger('hf_offload').info('said so')\nprint('done')\n"
    )
    done = offload(place, "plain.py")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "Nothing was offloaded: plain.py prepared no model" in done.stderr
    assert done.stderr.count("said so") == 1


@pytest.mark.parametrize(
    ("command", "variables", "part"),
    [
        ((), {}, "nothing to run"),
        (("nowhere.py",), {}, "python -m hf_offload.run: no such file: nowhere.py\n"),
        (("-m", "nowhere.to_be_found"), {}, "python -m hf_offload.run: no module named nowhere.to_be_found\n"),
        (("train.py",), {"HF_OFFLOAD_TIER": "tape"}, "HF_OFFLOAD_TIER='tape' is unknown"),
    ],
)
def test_mistakes_are_told_before_anything_runs(command, variables, part, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["hf_offload.run", *command])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert part in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("section", "variables", "part"),
    [
        ({"tier": "tape"}, {}, "wrong.yaml, section hf_offload_config: tier='tape' is unknown"),
        (None, {"HF_OFFLOAD_AUTOLOAD": "ture"}, "HF_OFFLOAD_AUTOLOAD='ture' is neither on nor off"),
    ],
)
def test_wrong_settings_of_a_plain_launch_are_one_message(place, section, variables, part):
    config = ONE | ({"hf_offload_config": section} if section else {})
    (place / "wrong.yaml").write_text(yaml.safe_dump(config))
    done = run(
        place, *ACCELERATE, "--config_file", "wrong.yaml", "train.py", **{"HF_OFFLOAD_AUTOLOAD": "1"} | variables
    )
    assert (done.returncode, done.stdout) == (2, "")
    (message,) = done.stderr.splitlines()
    assert part in message


@pytest.mark.parametrize(
    ("command", "becomes"),
    [
        (["/bin/accelerate", "launch", "--cpu", "train.py"], ["--cpu", "train.py"]),
        (["/bin/accelerate-launch", "train.py"], ["train.py"]),
        (["-u", "-m", "accelerate.commands.launch", "train.py", "launch"], ["train.py", "launch"]),
        (["-m", "accelerate.commands.accelerate_cli", "launch"], []),
        (["/bin/accelerate", "env"], None),
        (["train.py", "launch"], None),
    ],
)
@pytest.mark.parametrize("value", ["1", "off"])
def test_only_accelerates_launcher_becomes_ours(command, becomes, value, monkeypatch):
    made = []
    arguments = command[command.index("-m") + 1 :] if "-m" in command else command
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *command])
    monkeypatch.setattr(sys, "argv", ["-m" if "-m" in command else arguments[0], *arguments[1:]])
    monkeypatch.setattr(os, "execv", lambda _, words: made.append(words))
    monkeypatch.setenv("HF_OFFLOAD_AUTOLOAD", value)
    start()
    ours = [sys.executable, "-P", "-m", "hf_offload", "launch"]
    assert made == ([] if becomes is None or value == "off" else [[*ours, *becomes]])


# What the process is at the script's first line, and what it draws after it has seeded all generators.
STATE = """
import sys
modules = sorted(sys.modules)
names = ("__name__", "__file__", "__package__", "__spec__", "__doc__", "__builtins__")
main = {name: repr(globals()[name]) for name in names}
import json, locale, logging, multiprocessing, os, random, signal, threading, warnings
process = {
    "argv": sys.argv, "path": sys.path, "main": main, "is main": vars(sys.modules["__main__"]) is globals(),
    "hooks": [repr(hook) for hook in (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook)],
    "filters": repr(warnings.filters), "handlers": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
    "locale": locale.setlocale(locale.LC_ALL), "start method": multiprocessing.get_start_method(allow_none=True),
    "environment": dict(os.environ),
    "threads": threading.active_count(), "root log": repr(logging.getLogger().handlers), "limit": sys.getrecursionlimit(),
}
random.seed(0)
import torch, numpy
numpy.random.seed(0)
torch.manual_seed(0)
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(2, 2))
model(torch.ones(2)).sum().backward()
import rich.console, typer
drawn = [random.random(), numpy.random.rand(), torch.rand(()).item()]
print(json.dumps([modules, process, drawn]))
"""


def test_a_launched_script_finds_the_process_that_plain_python_gives_it(place):
    """Its arguments, paths, hooks and environment, and the generators of Python, NumPy and PyTorch, that draw the same."""
    (place / "scripts").mkdir()
    (place / "scripts" / "state.py").write_text(STATE)
    settings = {"HF_OFFLOAD_TIER": "ssd", "HF_OFFLOAD_DIRECTORY": str(place / "tier"), "HF_OFFLOAD_MIN_BYTES": "0"}

    def found(*command):
        done = run(place, *command, "scripts/state.py", "--a", **settings)
        assert done.returncode == 0, done.stderr
        return (*json.loads(done.stdout), done.stderr)

    modules, process, drawn, _ = found()
    its_modules, its_process, its_draws, log = found("-m", "hf_offload.run")
    assert "Nothing was offloaded" not in log
    others = {name.partition(".")[0] for name in set(its_modules) - set(modules)}
    of_pydantic = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
    of_python = {name for name in others if name in sys.stdlib_module_names or name.startswith("_sysconfigdata")}
    assert others - of_python - of_pydantic == {"hf_offload"}
    assert its_process == process
    assert its_draws == drawn


REFUSED = r"""
from accelerate import Accelerator
from hf_offload import OffloadConfigError, StorageError

def train():
    Accelerator()
    raise {error}("the drive\nis a tape")

train()
"""


def test_an_error_of_the_package_ends_a_launched_script_with_its_message(place):
    """And with the exit code that is documented. Errors of others keep their traceback."""
    message = f"{place / 'refused.py'}, line 7: the drive\nis a tape\n"
    variables = {"HF_OFFLOAD_DIRECTORY": str(place / "tier")}
    (place / "refused.py").write_text(REFUSED.format(error="StorageError"))
    done = run(place, "-m", "hf_offload.run", "refused.py", **variables)
    assert (done.returncode, done.stderr) == (1, message)
    (place / "refused.py").write_text(REFUSED.format(error="OffloadConfigError"))
    launched = run(place, "-m", "hf_offload", "launch", "refused.py", **variables)
    assert launched.returncode == 2
    assert launched.stderr.endswith(f"\n{message}The script ended with exit code 2.\n")
    assert "Traceback" not in launched.stderr
    (place / "refused.py").write_text(REFUSED.format(error="ValueError"))
    done = run(place, "-m", "hf_offload.run", "refused.py", **variables)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_importing_torch_looks_at_a_variable_and_loads_nothing(place):
    code = "import torch, sys; print(sorted(name for name in sys.modules if name.startswith('hf_offload')))"
    loaded = "['hf_offload', 'hf_offload.autoload', 'hf_offload.errors']\n"
    assert run(place, "-c", code, HF_OFFLOAD_AUTOLOAD="1").stdout == loaded


@pytest.mark.parametrize("first", ["from transformers import PreTrainedModel", "import accelerate"])
def test_whatever_a_script_imports_first_its_accelerators_offload(first, place):
    """transformers imports accelerate while it is itself half imported."""
    (place / "first.py").write_text(
        f"{first}\nimport accelerate\nprint(accelerate.Accelerator.__init__.__code__.co_filename)"
    )
    done = offload(place, "first.py", by=subprocess.run)
    assert done.stdout.strip().endswith("run.py"), done.stderr
