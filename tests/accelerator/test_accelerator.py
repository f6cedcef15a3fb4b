"""Our suites on an accelerator of our own, each file in a process, for the late device becomes *the* accelerator of its
process. The backend is built once; where it cannot be, every test is skipped by name.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import backend

_HERE = Path(__file__).parent / "on_device"
FILES = sorted(path.stem for path in _HERE.glob("test_*.py"))
_reason = backend.why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=f"the late device cannot be built: {_reason}")


def run(file: str, *options: str) -> None:
    """Run a file's tests with the late device as their accelerator; what fails there fails here."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
    environment = os.environ | {"TEST_ON_LATE_DEVICE": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [*command, *options, str(_HERE / f"{file}.py")], env=environment, capture_output=True, text=True, timeout=3500
    )
    assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-4000:]}"


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("file", FILES)
def test_on_the_late_device(file: str) -> None:
    run(file, "-m", "not full")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES)
def test_on_the_late_device_in_full(file: str) -> None:
    run(file, "-m", "full")
