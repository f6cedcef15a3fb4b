"""The command itself, whatever it is asked to do."""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from hf_offload.cli.console import make_table, print_table, visible_log, write
from hf_offload.cli.main import app
from hf_offload.settings.models import model_names
from hf_offload.settings.recipe_files import recipe_names
from tests.helpers.tables import rows

ROOT = Path(__file__).resolve().parent.parent.parent


def test_it_says_the_version_that_is_installed():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"hf-offload {metadata.version('hf-offload')}\n")


@pytest.mark.parametrize("columns", [80, 120])
def test_recipes_are_listed_with_names_that_can_be_copied(columns):
    shown = CliRunner().invoke(app, ["recipes", "list"], env={"COLUMNS": str(columns)}).stdout
    words = shown.replace(",", " ").split()
    assert set(recipe_names()) <= set(words)
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


def test_a_column_of_sentences_is_never_a_ladder_of_words(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    reason = "15.5 ms again; moving takes 37 ms"
    table = make_table("Units", ("unit", "saves", "compute", "placement", "reason"), left=("placement", "reason"))
    table.add_row("model.layers.0-15.self_attn (16 x)", "112.00 MiB", "8.83 ms", "recompute", reason)
    print_table(table)
    shown = capsys.readouterr().out
    assert reason in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("columns", [40, 60, 79, 80, 81, 100])
def test_no_table_is_cut_however_narrow_the_terminal(columns, words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    for longer in range(40):
        name, sentence = "LlamaForCausalLM" + "x" * longer, "tiled loss and MLP"
        headings = ("no order beats", "peak", "of the first")
        table = make_table("Title", ("", *headings, "peak in"), left=(*(headings if words else ()), "peak in"))
        table.add_row(sentence, "35,072", "13.19", "1.000", name)
        print_table(table)
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= max(columns, len(name) + 6)
        assert {"35,072", "13.19", "1.000"} <= {*shown.replace(", ", " ").replace("│", " ").split()}
        assert (sentence in shown, name in shown.replace("\n", "").replace(" ", "")) == (True, True)


def test_commands_print_in_one_way():
    for file in (ROOT / "hf_offload" / "cli").glob("*.py"):
        if file.name != "console.py":
            assert not re.search(r"\bTable\(|\.print\(|\becho\(|\bConsole\(", file.read_text()), file.name


def test_lines_of_results_and_of_the_log_are_never_wrapped(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    long = "word " * 50 + "[bold] a\udcffb"
    write(long)
    with visible_log():
        logging.getLogger("hf_offload.any").warning(long)
    shown = capsys.readouterr()
    expected = long.replace("\udcff", "\\udcff")
    assert (shown.out, shown.err) == (f"{expected}\n", f"WARNING  {expected}\n")


def commands(command, *words):
    """All commands and groups, with the words that call them."""
    yield words, command
    for name, one in getattr(command, "commands", {}).items():
        yield from commands(one, *words, name)


COMMANDS = dict(commands(get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_a_narrow_terminal_and_cuts_nothing(words):
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).stdout
    assert "Usage" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    found = {*shown.replace("│", " ").split()}
    texts = [COMMANDS[words].help]
    for parameter in COMMANDS[words].params:
        texts += [getattr(parameter, "help", None), *(name for name in parameter.opts if name.startswith("-"))]
    missing = {word for text in texts if text for word in text.split()} - found
    # A command's help is shown as markup.
    assert not {word for word in missing if "`" not in word}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_is_explained_in_one_line(words):
    for parameter in COMMANDS[words].params:
        text = getattr(parameter, "help", None)
        if text and "completion" not in text:  # typer's own
            assert (len(text) <= 160, text[:1].isupper(), text[-1:], "\n" in text) == (True, True, ".", False), text


TINY = [
    "model.config.n_layer=2", "model.config.n_embd=32", "model.config.n_head=2", "model.config.vocab_size=128",
    "data.sequence_length=16", "training.max_steps=2", "training.per_device_train_batch_size=2",
]  # fmt: skip
SILENT = {
    "plan": ["plan", "gpt2-small", *TINY, "--gpu", "rtx4090", "--memory-mode", "lora", "--plot", "plan.png"],
    "modes": ["plan", "gpt2-small", *TINY, "--gpu", "rtx4090", "--modes", "--memory-mode", "lora,lisa"],
    "doctor": ["doctor", "--no-measure"],
    "recipes list": ["recipes", "list", "--family", "gpt"],
    "recipes show": ["recipes", "show", "gpt/demo"],
    "recipes validate": ["recipes", "validate", "gpt/demo"],
    "config": ["config", "--where", "fsdp2"],
    "bench steps": ["bench", "steps", "gpt2-small", *TINY, "--strategies", "baseline,ours:ssd", "--json"],
    "bench overhead": ["bench", "overhead", "--tensors", "5", "--repetitions", "2"],
    "bench disk": ["bench", "disk", "--size", "96MiB", "--rounds", "1"],
    "train": ["train", "bench/gpt2-small", *TINY, "--report", "report.json"],
}
"""Commands that have nothing to say on standard error; only ``train`` says how it goes."""


@pytest.mark.parametrize("name", rows(SILENT, quick=["plan", "doctor", "recipes show"]))
def test_no_library_warns_on_any_command(name, tmp_path):
    command = [sys.executable, "-W", "default", "-m", "hf_offload", *SILENT[name]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if name == "train":
        assert not [line for line in done.stderr.splitlines() if "Warning" in line or "[transformers]" in line]
    else:
        assert done.stderr == ""


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
    ["train", "gpt/demo", "data.sequence_lenght=3", "offload.tier=sdd"],
    ["train", "gpt/demo", "model.task=gpt22"],
    ["train", "gpt/dmeo"],
    ["plan", "gpt/demo", "offload.tier=sdd"],
    ["bench", "steps", "gpt2-small", "model.dtype=float8"],
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
    ["train", "gpt/demo", "--report", "run.pdf"],
    ["train", "gpt/demo", "--report", "run.html"],
    ["plan", "gpt/demo", "--plot", "plot.svg"],
    ["plan", "gpt/demo", "--memory-budget", "much"],
    ["plan", "gpt/demo", "--batch", "0"],
    ["plan", "gpt/demo", "--dtype", "int8"],
    ["plan", "gpt/demo", "--autocast", "fp8"],
    ["plan", "gpt/demo", "--task", "chess"],
    ["plan", "gpt/demo", "--recompute-elementwise", "much"],
    ["plan", "gpt/demo", "--sampled-linear", "7"],
    ["plan", "gpt/demo", "--modes", "--plot", "a.png"],
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


@pytest.mark.parametrize("at", ["hf_offload.cli.main", "torch"])
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


SLOW = {
    "plan": (["plan", "llama-8b", "--gpu", "rtx4090"], "Counting a step"),
    "doctor": (["doctor"], "Measuring the machine"),
    "bench steps": (["bench", "steps", "gpt2-small"], "running gpt2-small"),
    "bench disk": (["bench", "disk", "--size", "512MiB", "--rounds", "200"], "/200"),
}
"""Commands that take seconds or more, and what they show on a terminal meanwhile. Not while they import: some library there
drops a Ctrl-C now and then.
"""


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
@pytest.mark.parametrize("name", rows(SLOW, quick=["plan", "doctor"]))
def test_what_takes_long_shows_it_on_a_terminal_and_ctrl_c_ends_it_with_one_line(name, tmp_path):
    words, expected = SLOW[name]
    terminal, standard_error = os.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "hf_offload", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=standard_error, cwd=tmp_path, env=environment
    ) as running:
        os.close(standard_error)
        shown = ""
        with contextlib.suppress(OSError):  # the other side was closed: the command has ended
            while piece := os.read(terminal, 1 << 16):
                before, shown = shown, shown + piece.decode(errors="replace")
                if expected in shown and expected not in before:
                    running.send_signal(signal.SIGINT)
        code = running.wait()
    os.close(terminal)
    assert (code, "Traceback" in shown) == (130, False), shown
    assert shown.count("Stopped.") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("words", [["recipes", "show", "gpt/demo"], ["--help"]], ids=" ".join)
def test_output_to_a_full_device_is_one_line_of_error(words):
    with open("/dev/full", "w") as full:  # noqa: PTH123  a device
        done = subprocess.run(
            [sys.executable, "-m", "hf_offload", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert (
        done.stderr == "The output cannot be written: No space left on device. Free some space, or write elsewhere.\n"
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [("pl", "plan"), ("recipes va", "validate"), ("plan llama-1b --dt", "--dtype"), ("train --res", "--resume")],
)
def test_a_shell_completes_commands_and_options(line, found):
    asked = {"COMP_WORDS": f"hf-offload {line}", "COMP_CWORD": str(len(line.split()))}
    environment = {"_HF_OFFLOAD_COMPLETE": "complete_bash"} | asked
    assert CliRunner().invoke(app, [], prog_name="hf-offload", env=environment).stdout.split() == [found]


def test_what_is_installed_starts_there():
    (script,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()
    assert script == "hf_offload.cli.start:main"
