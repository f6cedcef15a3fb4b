"""Where results cannot be written, that is an error before the work begins, which names the option."""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app as benchmarks
from hf_offload import OffloadConfigError
from hf_offload.cli.main import app
from hf_offload.settings.outputs import check_output_file, check_output_folder
from hf_offload.settings.text_files import write_whole

LONG = "x" * 256


@pytest.fixture
def place(tmp_path):
    (tmp_path / "file").write_text("content")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "dangling").symlink_to("later")
    return tmp_path


NOWHERE = [
    ("file/below", r"/file' is not a folder"),
    ("file/below/further", r"/file' is not a folder"),
    ("loop", "is a link to itself"),
    ("loop/below", "is a link to itself"),
    (LONG, "File name too long"),
    ("new/" + LONG, "more than 255 bytes"),
    ("ü" * 128, "File name too long"),
    ("/proc/self/fdinfo/new", "cannot be written to"),
    ("a\0b", "null"),
]
ANYWHERE = ["new", "new/further", "folder/new", "link/new", "dangling", "x" * 255]


@pytest.mark.parametrize("check", [check_output_file, check_output_folder])
@pytest.mark.parametrize(("name", "message"), NOWHERE, ids=[repr(name[:30]) for name, _ in NOWHERE])
def test_what_cannot_be_made_is_an_error_that_names_the_option(place, check, name, message):
    with pytest.raises(OffloadConfigError, match=message) as raised:
        check(place / name, "--where")
    text = str(raised.value)
    assert text.startswith("--where=")
    assert len(text) < 700


def test_a_folder_is_no_file_and_a_file_no_folder(place):
    with pytest.raises(OffloadConfigError, match=r"--report=.*it is a folder; name a file"):
        check_output_file(place / "folder", "--report")
    with pytest.raises(OffloadConfigError, match=r"--report=.*it is a folder"):
        check_output_file(place / "link", "--report")
    with pytest.raises(OffloadConfigError, match=r"--output=.*is not a folder; name a folder"):
        check_output_folder(place / "file", "--output")


def test_files_that_are_to_lie_in_a_folder_are_looked_at(place):
    check_output_folder(place / "folder", "--output", "table.md", "table.json")
    with pytest.raises(OffloadConfigError, match=r"--output=.*: inside is to lie in it, and it is a folder; remove it"):
        check_output_folder(place / "folder", "--output", "table.md", "inside")


@pytest.mark.parametrize("name", ANYWHERE)
def test_what_can_be_made_is_accepted_and_not_made(place, name):
    before = sorted(place.rglob("*"))
    check_output_file(place / name, "--report")
    check_output_folder(place / name, "--output")
    check_output_file(place / "file", "--report")
    check_output_folder(place / "folder", "--output")
    assert sorted(place.rglob("*")) == before
    assert (place / "file").read_text() == "content"


def test_a_path_of_the_current_folder_needs_no_folder(place, monkeypatch):
    monkeypatch.chdir(place)
    check_output_file("new.json", "--report")
    check_output_folder(".", "--output")


AS_NOBODY = """
import os, sys
from hf_offload import OffloadConfigError
from hf_offload.settings.outputs import check_output_file, check_output_folder
from hf_offload.settings.text_files import write_whole
if os.geteuid() == 0:
    os.seteuid(54321)
for check in (check_output_file, check_output_folder):
    try:
        check(sys.argv[1], "--where")
    except OffloadConfigError as error:
        print(error)
"""


@pytest.mark.parametrize("name", ["new", "file", "new/further"])
def test_without_permission_it_is_an_error(name):
    """Root may write anywhere, so this is another user."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "file").write_text("content")
        (Path(directory) / "file").chmod(0o444)
        Path(directory).chmod(0o555)
        path = os.path.join(directory, name)  # noqa: PTH118  as it is typed
        done = subprocess.run([sys.executable, "-c", AS_NOBODY, path], capture_output=True, text=True, check=True)
        Path(directory).chmod(0o755)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"--where={path!r} cannot be written to: ") for line in lines)
    assert "Permission denied" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--report", "text.txt/report.json"], "--report"),
        (["--report", "tier"], "--report"),
        (["--report", LONG], "--report"),
        (["training.output_dir=text.txt"], "training.output_dir"),
        (["training.output_dir=text.txt/below"], "training.output_dir"),
        (["data.cache_dir=text.txt/below"], "data.cache_dir"),
    ],
)
def test_train_says_it_before_it_reads_the_data(tiny_recipe, tmp_path, monkeypatch, arguments, option):
    from hf_offload.training import run

    def read(*arguments):
        raise AssertionError("the data was read")

    monkeypatch.setattr(run, "build_tokenizer", read)
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, ["train", str(tiny_recipe), *arguments])
    assert result.exit_code == 2, result.output
    assert f"{option}=" in result.stderr
    assert "cannot be written to" in " ".join(result.stderr.split())
    assert sorted(tmp_path.rglob("*")) == before


def invoke(command):
    """``hf-offload ...``, or ``python -m benchmarks ...``."""
    program, *options = command
    return CliRunner().invoke(benchmarks, options) if program == "benchmarks" else CliRunner().invoke(app, command)


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "steps", "gpt2-small"],
        ["benchmarks", "budgets"],
        ["benchmarks", "limits", "gpt2-small"],
        ["benchmarks", "accuracy", "--data-dir", "."],
        ["benchmarks", "modes", "--data-dir", "."],
        ["benchmarks", "sampling"],
    ],
    ids=lambda command: command[1],
)
def test_benchmarks_say_it_before_they_run(tmp_path, command):
    (tmp_path / "file").write_text("")
    result = invoke([*command, "--output", str(tmp_path / "file")])
    assert result.exit_code == 2, result.output
    assert "--output=" in result.stderr
    assert "is not a folder" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["bench", "steps", "gpt2-small"], "table.json"),
        (["benchmarks", "budgets"], "budgets.json"),
        (["benchmarks", "limits", "gpt2-small"], "limits.json"),
        (["benchmarks", "accuracy", "--data-dir", "."], "accuracy.md"),
        (["benchmarks", "modes", "--data-dir", "."], "modes.png"),
        (["benchmarks", "sampling"], "sampling.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_benchmarks_look_at_the_files_they_write_last(tmp_path, command, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    result = invoke([*command, "--output", str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert f"{name} is to lie in it, and it is a folder" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["plan", "gpt/demo", "--plot"], "--plot"),
        (["config", "--config_file"], "--config_file"),
        (["train", "gpt/demo", "--report"], "--report"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("kind", ["below a file", "a long name"])
def test_every_file_that_is_written_is_checked_first(tmp_path, command, option, kind):
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "x.yaml" if kind == "below a file" else tmp_path / f"{LONG}.yaml"
    result = CliRunner().invoke(app, [*command, str(target)])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert f"{option}=" in result.stderr
    assert "cannot be written to" in " ".join(result.stderr.split())


def test_a_text_that_does_not_fit_leaves_nothing_and_the_error_names_its_file(tmp_path):
    path = tmp_path / "run.json"
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, former[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write_whole(path, "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert (raised.value.filename, list(tmp_path.iterdir())) == (str(path), [])


def test_a_text_is_written_through_links_and_to_devices(place):
    write_whole(place / "dangling", "text")
    assert ((place / "later").read_text(), (place / "dangling").is_symlink()) == ("text", True)
    (place / "null").symlink_to(os.devnull)
    write_whole(place / "null", "text")
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize("name", ["run.pdf", "run.html", "run", "json"])
def test_an_ending_of_another_format_is_refused(place, name):
    with pytest.raises(OffloadConfigError, match=r"--report=.* end the name in \.json"):
        check_output_file(place / name, "--report", ".json")
    check_output_file(place / "run.JSON", "--report", ".json")
