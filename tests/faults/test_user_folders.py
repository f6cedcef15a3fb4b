"""What is learned about a machine is kept among the user's files; where it cannot be, a warning says so, and work goes on."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hf_offload.planning import hardware
from hf_offload.planning.hardware import measure_hardware

NOBODY = 54321
VARIABLE = "XDG_CACHE_HOME"

# Steps with a budget, for which the machine is measured.
SCRIPT = f"""
import logging, os, sys
logging.basicConfig(format="%(levelname)s %(message)s")
os.setreuid({NOBODY}, 0)
from hf_offload.planning import hardware
hardware._measure_device = lambda device: dict.fromkeys(hardware._device_rates(device.type), 1e9)
hardware._measure_drives = lambda directories, options: dict.fromkeys(hardware._DRIVE_RATES, 1e9)
from hf_offload import OffloadConfig, offload_activations
from tests.helpers.tiny_models import tiny_batch, tiny_model
model = tiny_model("gpt2")
config = OffloadConfig(tier="auto", memory_budget="100MiB", directory=sys.argv[1], min_bytes=0)
with offload_activations(model, config) as session:
    for _ in range(3):
        model(**tiny_batch("gpt2")).loss.backward()
        session.end_step()
    assert session.stats.total.written_bytes > 0
print("done")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be a user without an account")
def test_a_user_without_home_and_account_trains(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", VARIABLE)}
    environment["HF_HOME"] = str(tmp_path / "home")
    with tempfile.TemporaryDirectory() as directory:  # pytest's are nobody else's
        Path(directory).chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, directory], env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    warnings = [line for line in done.stderr.splitlines() if "home directory" in line]
    assert len(warnings) == 1, done.stderr
    assert all(line.startswith("WARNING ") and "Set XDG_" in line for line in warnings)


@pytest.fixture
def made_up(monkeypatch):
    """A drive, and rates that take no time to measure; the number of measurements."""
    measured = []
    hardware._warn.cache_clear()

    def measure(device):
        measured.append(device)
        return dict.fromkeys(hardware._device_rates(device.type), 1e9)

    monkeypatch.setattr(hardware, "_measure_device", measure)
    monkeypatch.setattr(hardware, "_measure_drives", lambda *_: dict.fromkeys(hardware._DRIVE_RATES, 1e9))
    return measured


def folder_is_a_file(root):
    (root / "hf_offload").write_text("a file")


def parent_is_a_file(root):
    root.rmdir()
    root.write_text("a file")


def folder_is_a_loop(root):
    (root / "hf_offload").symlink_to("hf_offload")


def no_such_user(root):
    root.rmdir()
    return "~no-such-user/folder"


def name_is_too_long(root):
    return str(root / ("x" * 300))


def files_are_folders(root):
    paths = []
    with pytest.MonkeyPatch.context() as context:
        context.setattr(hardware, "_write", lambda key, _: paths.append(hardware._cache_file(key)))
        context.setenv("XDG_CACHE_HOME", str(root))
        measure_hardware([])
    for path in paths:
        (path / "inside").mkdir(parents=True)


def system_of_processes(root):
    """Where nothing can be made, even by root."""
    return "/proc/self/fdinfo"


def warned(caplog):
    """What the package has said cannot be kept; it must have said nothing else."""
    once = "hf_offload.allocator"  # warns once a process
    ours = [one.getMessage() for one in caplog.records if one.name.startswith("hf_offload") and one.name != once]
    return [message.split(" cannot be kept ")[0] for message in ours]


@pytest.mark.parametrize(
    "make",
    [
        folder_is_a_file, parent_is_a_file, folder_is_a_loop, no_such_user, name_is_too_long, files_are_folders,
        system_of_processes,
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_used_costs_one_warning(tmp_path, monkeypatch, caplog, made_up, make):
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setenv(VARIABLE, make(root) or str(root))
    measure_hardware([])
    assert warned(caplog) == ["Measurements of this machine"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"memory": Infinity}', b'{"memory": "fast"}', b"9" * 5000],
)
def test_a_damaged_file_of_measurements_is_measured_again(tmp_path, monkeypatch, made_up, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure_hardware([])
    measure_hardware([])
    assert len(made_up) == 1
    (path,) = (tmp_path / "hf_offload").iterdir()
    sound = path.read_bytes()
    path.write_bytes(content)
    measure_hardware([])
    assert len(made_up) == 2
    assert path.read_bytes() == sound
    assert list(path.parent.iterdir()) == [path]
