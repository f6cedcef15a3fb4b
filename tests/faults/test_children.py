"""Processes that the package starts end with it, however it is ended, and nothing of theirs is left."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from hf_offload.parents import bound, end_with_parent
from hf_offload.settings.environment import PARENT_VARIABLE
from tests.integration.test_launch import CONFIG

TIMEOUT_S = 120
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel to end children")

# A training that goes on until it is ended, and says that it has begun.
SCRIPT = """
import sys, time
from pathlib import Path
from accelerate import Accelerator
Path(sys.argv[1], f"began-{Accelerator().process_index}").touch()
time.sleep(1000)
"""


class Command:
    """``hf-offload`` with arguments, in a process of its own with a temporary folder of its own."""

    def __init__(self, folder, *arguments):
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        environment = os.environ | {
            "TMPDIR": str(self.temporary), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder),
        }  # fmt: skip
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                bound([sys.executable, "-m", "hf_offload", *arguments]),
                cwd=folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._log = folder / "log"

    def wait_for(self, begun):
        wait_until(lambda: begun() or self.process.poll() is not None)
        assert self.process.poll() is None, self._log.read_text()

    def children(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number):
        """End it; whoever is still there of those it has started is the answer."""
        children = self.children()
        assert children
        self.process.send_signal(number)
        self.process.wait(TIMEOUT_S)
        _, alive = psutil.wait_procs(children, timeout=TIMEOUT_S)
        for child in alive:
            child.kill()
        return alive

    def left(self):
        """Files in the temporary folder; folders are caches of other packages'."""
        return [path.name for path in self.temporary.iterdir() if path.is_file()]


def wait_until(true):
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


FULL = pytest.mark.full
ENDS = [pytest.param(signal.SIGTERM, id="SIGTERM", marks=FULL), pytest.param(signal.SIGKILL, id="SIGKILL")]


@pytest.mark.parametrize("number", ENDS)
def test_a_benchmark_that_is_ended_ends_its_training(tiny_recipe, tmp_path, number):
    arguments = ["bench", "steps", str(tiny_recipe), "training.max_steps=1000000", "--strategies", "baseline"]
    command = Command(tmp_path, *arguments, "--output", "runs", "--allocator", "glibc")
    logs = lambda: list((tmp_path / "runs").rglob("*.log"))  # noqa: E731
    command.wait_for(lambda: any("loss" in path.read_text() for path in logs()))
    assert command.end(number) == []
    assert command.left() == []


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=FULL)])
@pytest.mark.parametrize("number", ENDS)
def test_a_launcher_that_is_ended_ends_its_script(tmp_path, number, processes):
    (tmp_path / "train.py").write_text(SCRIPT)
    kind = {"num_processes": processes} | ({"distributed_type": "NO"} if processes == 1 else {})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG | kind | {"hf_offload_config": {"tier": "ram"}}))
    command = Command(tmp_path, "launch", "--config_file", "config.yaml", "train.py", str(tmp_path))
    command.wait_for(lambda: len(list(tmp_path.glob("began-*"))) == processes)
    assert command.end(number) == []
    assert command.left() == []


def test_a_program_does_not_begin_after_its_parent_has_ended(tmp_path):
    """The parent may end before the kernel is asked to watch it."""
    program = bound([sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"])
    at = program.index(str(os.getpid()))
    assert subprocess.run(program, check=False).returncode == 0
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    program[at] = str(gone.pid)
    assert subprocess.run(program, check=False).returncode == 1
    assert not (tmp_path / "ran").exists()


def test_what_a_script_starts_is_not_bound_in_its_turn(monkeypatch):
    monkeypatch.setenv(PARENT_VARIABLE, "1")
    monkeypatch.setattr(sys, "platform", "darwin")
    end_with_parent()
    assert PARENT_VARIABLE not in os.environ
