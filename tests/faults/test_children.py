"""Processes that the package starts end with it, however it is ended, and nothing of theirs is left."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from hf_offload.parents import bound, end_with_parent, parent_variables
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


def test_a_benchmark_that_is_killed_ends_its_training(tiny_recipe, tmp_path):
    arguments = ["bench", "steps", str(tiny_recipe), "training.max_steps=1000000", "--strategies", "baseline"]
    command = Command(tmp_path, *arguments, "--output", "runs", "--allocator", "glibc")
    logs = lambda: list((tmp_path / "runs").rglob("*.log"))  # noqa: E731
    command.wait_for(lambda: any("loss" in path.read_text() for path in logs()))
    assert command.end(signal.SIGKILL) == []
    assert command.left() == []


def test_a_launcher_that_is_terminated_ends_its_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    config = CONFIG | {"num_processes": 1, "distributed_type": "NO", "hf_offload_config": {"tier": "ram"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = Command(tmp_path, "launch", "--config_file", "config.yaml", "train.py", str(tmp_path))
    command.wait_for(lambda: list(tmp_path.glob("began-*")))
    assert command.end(signal.SIGTERM) == []
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


def test_a_script_whose_launcher_has_ended_ends_and_one_of_another_machine_goes_on():
    code = "from hf_offload.parents import end_with_parent; end_with_parent(); print('goes on')"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = parent_variables()[PARENT_VARIABLE]
    boot = here.rpartition(":")[0]
    for value, code_expected in ((here, 0), (f"{boot}:{gone.pid}", -signal.SIGTERM), (f"other:{gone.pid}", 0)):
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | {PARENT_VARIABLE: value}, check=False)
        assert done.returncode == code_expected


STUBBORN = """
import os, signal, sys, time
from hf_offload.parents import end_with_parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)
end_with_parent(grace_s=0.2)
print(os.getpid(), flush=True)
time.sleep(1000)
"""
# Begins it, waits until it is told to end, and leaves it behind.
PARENT = """
import os, subprocess, sys
from hf_offload.parents import parent_variables
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=os.environ | parent_variables())
sys.stdin.read()
"""


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_script_that_ignores_sigterm_is_killed_when_its_parent_has_ended():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT, STUBBORN], text=True, **pipes) as parent:
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
        parent.wait(TIMEOUT_S)
        wait_until(lambda: gone(pid))


def test_a_script_that_ignores_sigterm_and_began_too_late_is_killed():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    boot = parent_variables()[PARENT_VARIABLE].rpartition(":")[0]
    environment = os.environ | {PARENT_VARIABLE: f"{boot}:{ended.pid}"}
    done = subprocess.run([sys.executable, "-c", STUBBORN], env=environment, check=False, timeout=TIMEOUT_S)
    assert done.returncode == -signal.SIGKILL


def test_a_script_lives_on_beside_its_parent(monkeypatch):
    """Longer than the time after which it is killed without."""
    code = STUBBORN.replace("time.sleep(1000)", "time.sleep(1); print('done')")
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | parent_variables(), capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("done\n")


def test_what_a_script_starts_is_not_bound_in_its_turn(monkeypatch):
    monkeypatch.setenv(PARENT_VARIABLE, "other:1")
    end_with_parent()
    assert PARENT_VARIABLE not in os.environ
