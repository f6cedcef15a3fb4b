"""The command itself, whatever it is asked to do."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_offload.cli.main import app

ROOT = Path(__file__).resolve().parent.parent.parent


def test_it_says_the_version_that_is_installed():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"hf-offload {metadata.version('hf-offload')}\n")


def test_help_says_what_it_is_for():
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "gradients that are exact to the last bit" in shown


WRONG_SETTINGS = [
    ["train", "gpt/demo", "training.learning_rat=3"],
    ["train", "gpt/demo", "training.per_device_train_batch_size=0"],
    ["train", "gpt/demo", "model.config.n_layre=3", "offload.tier=sdd"],
    ["train", "gpt/demo", "model.architecture=gpt22"],
    ["train", "gpt/dmeo"],
    ["plan", "gpt/demo", "offload.tier=sdd"],
    ["bench", "steps", "gpt2-small", "model.dtype=float8"],
    ["bench", "limits", "gpt2-small", "model.dtype=float8"],
    ["bench", "budgets", "gpt2-small", "model.dtype=float8"],
    ["recipes", "validate", "gpt/dmeo"],
    ["train", "gpt/demo", "offload.tier=ssd", "offload.directory=/proc"],
    ["train", "gpt/demo", "training.output_dir=/proc/x"],
    ["train", "gpt/demo", "data.cache_dir=/proc/x"],
    ["train", "gpt/demo", "--report", "/proc/x/y"],
    ["train", "gpt/demo", "--resume", "training.output_dir=/nowhere"],
    ["bench", "steps", "gpt/demo", "offload.tier=ssd", "offload.directory=/proc"],
    ["bench", "steps", "gpt/demo", "--output", "/proc/x"],
    ["plan", "gpt/demo", "--gpu", "foo"],
    ["plan", "gpt/demo", "--tflops", "80"],
    ["plan", "gpt/demo", "--plot", "/proc/x.png"],
    ["plan", "gpt/demo", "--timeline", "/proc"],
    ["plan", "gpt/demo", "--memory-budget", "much"],
    ["plan", "gpt/demo", "--batch", "0"],
    ["plan", "gpt/demo", "--dtype", "int8"],
    ["plan", "gpt/demo", "--autocast", "fp8"],
    ["plan", "gpt/demo", "--task", "chess"],
    ["plan", "gpt/demo", "--recompute-elementwise", "much"],
    ["plan", "gpt/demo", "--sampled-linear", "7"],
    ["plan", "order", "gpt/demo", "--plot", "a.png"],
    ["plan", "levers", "gpt/demo", "--gpus", "rtx9999"],
    ["plan", "gpt/demo", "--directory", "/proc"],
]


def test_wrong_settings_are_refused_before_torch_is_imported():
    code = f"""
import sys
from typer.testing import CliRunner
from hf_offload.cli.main import app
for words in {WRONG_SETTINGS!r}:
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (1, 2) and result.stderr.strip(), (words, result.output, result.exception)
    assert not {{"torch", "transformers", "datasets"}} & set(sys.modules), words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("at", ["hf_offload.cli.main", "torch", "typer"])
def test_ctrl_c_while_modules_are_imported_shows_no_traceback(at):
    code = f"""
import sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
sys.argv = ["hf-offload", "train", "gpt/demo"]
from hf_offload.cli.start import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (130, "Stopped.", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("words", [["recipes", "show", "gpt/demo"], ["--help"], ["recipes", "list"]], ids=" ".join)
def test_output_to_a_full_device_is_one_line_of_error(words):
    with open("/dev/full", "w") as full:  # noqa: PTH123  a device
        done = subprocess.run(
            [sys.executable, "-m", "hf_offload", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert (
        done.stderr == "The output cannot be written: No space left on device. Free some space, or write elsewhere.\n"
    )


def test_what_is_installed_starts_there():
    (script,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()
    assert script == "hf_offload.cli.start:main"
