"""Where results cannot be written, that is an error before the work begins, which names the option."""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hf_offload import OffloadConfigError
from hf_offload.settings.outputs import check_output_file, check_output_folder
from hf_offload.settings.text_files import write_whole
from tests.helpers.command_line import benchmark, command, said

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


@pytest.mark.parametrize("name", ["file", "new/further"])
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
        (["training.output_dir=text.txt"], "training.output_dir"),
        (["data.cache_dir=text.txt/below"], "data.cache_dir"),
    ],
)
def test_train_says_it_before_it_reads_the_data(tiny_recipe, tmp_path, monkeypatch, arguments, option):
    from hf_offload.training import run

    def read(*arguments):
        raise AssertionError("the data was read")

    monkeypatch.setattr(run, "build_tokenizer", read)
    before = sorted(tmp_path.rglob("*"))
    result = command("train", tiny_recipe, *arguments)
    assert result.exit_code == 2, result.output
    assert f"{option}=" in result.stderr
    assert "cannot be written to" in said(result)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("run", "words", "name"),
    [
        (command, ["bench", "steps", "gpt2-small"], "table.json"),
        (benchmark, ["budgets"], "budgets.json"),
        (benchmark, ["limits", "gpt2-small"], "limits.json"),
        (benchmark, ["accuracy", "--data-dir", "."], "accuracy.md"),
        (benchmark, ["modes", "--data-dir", "."], "modes.png"),
        (benchmark, ["sampling"], "sampling.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_benchmarks_look_at_the_files_they_write_last(tmp_path, run, words, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    result = run(*words, "--output", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert f"{name} is to lie in it, and it is a folder" in said(result)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["plan", "gpt/demo", "--plot"], "--plot"),
        (["config", "--config_file"], "--config_file"),
        (["train", "gpt/demo", "--report"], "--report"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_file_that_is_written_is_checked_first(tmp_path, words, option):
    (tmp_path / "file").write_text("")
    result = command(*words, tmp_path / "file" / "x.yaml")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert f"{option}=" in result.stderr
    assert "cannot be written to" in said(result)


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
