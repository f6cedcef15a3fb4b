"""The command itself, whatever it is asked to do."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_offload.cli.console import make_table, print_table
from hf_offload.cli.main import app
from hf_offload.settings.models import model_names
from hf_offload.settings.recipe_files import recipe_names

ROOT = Path(__file__).resolve().parent.parent.parent


def test_it_says_the_version_that_is_installed():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"hf-offload {metadata.version('hf-offload')}\n")


def test_help_says_what_it_is_for():
    shown = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "gradients that are exact to the last bit" in shown


@pytest.mark.parametrize("columns", [80, 120])
def test_recipes_are_listed_with_names_that_can_be_copied(columns):
    shown = CliRunner().invoke(app, ["recipes", "list"], env={"COLUMNS": str(columns)}).stdout
    words = shown.replace(",", " ").split()
    for name in (*recipe_names(), "sentence-transformers/all-MiniLM-L6-v2", "mistralai/Mistral-7B-Instruct-v0.3"):
        assert name in words
    assert max(map(len, shown.splitlines())) <= columns


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_a_table_keeps_names_and_words_whole(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    name, reason = "base_model.model.model.layers.0-31.self_attn", "it fits into memory"
    table = make_table("Units", ("unit", "saves", "reason"), "A caption.", left=("reason",))
    table.add_row(name, "1.00 GiB", reason)
    table.add_row("lm_head", "-", "nothing")
    print_table(table)
    shown = capsys.readouterr().out
    assert name in shown
    words = shown.split()
    assert {*reason.split(), "Units", "caption.", "lm_head", "nothing"} <= {*words}
    assert "…" not in shown


def test_help_fits_a_narrow_terminal_and_cuts_nothing():
    commands = (
        [], ["train"], ["plan"], ["plan", "run"], ["plan", "modes"], ["plan", "levers"], ["plan", "order"], ["launch"],
        ["doctor"], ["config"], ["card"], ["bench"], ["bench", "steps"], ["recipes"], ["recipes", "predict"],
    )  # fmt: skip
    for words in commands:
        shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).stdout
        assert "Usage" in shown
        assert max(map(len, shown.splitlines())) <= 80, words
        assert "…" not in shown, words


def test_a_short_name_that_is_wrong_names_the_nearest():
    result = CliRunner().invoke(app, ["plan", "lama-8b", "--gpu", "rtx4090"])
    message = " ".join(result.stderr.split())
    assert result.exit_code == 2
    assert "Did you mean 'llama-8b'?" in message
    assert sum(name in message.replace(",", " ").split() for name in model_names()) <= 5


def test_a_hub_that_does_not_answer_is_asked_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = []

        def hang_up():
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    connection, _ = server.accept()
                    asked.append(connection)
                    connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        hub = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-m", "hf_offload", "plan", "owner/lama-8b", "--gpu", "rtx4090"]
        environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub, "NO_PROXY": "*"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert result.returncode == 2
    assert "the hub cannot be reached" in result.stderr
    assert "Did you mean" in result.stderr
    assert result.stderr.count("\n") == 1, "one message, and no other library's warnings"
    assert len(asked) == 1


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
    ["plan", "gpt/demo", "--html", "/proc/x.html"],
    ["train", "gpt/demo", "--report", "/proc/x.html"],
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
from hf_offload.cli.console import make_table, print_table
from hf_offload.cli.main import app
from hf_offload.settings.models import model_names
from hf_offload.settings.recipe_files import recipe_names
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
