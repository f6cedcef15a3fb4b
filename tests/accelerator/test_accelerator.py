"""Our suites on an accelerator of our own, each file in a process, for the late device becomes *the* accelerator of its
process. The backend is built once; where it cannot be, every test is skipped by name.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.accelerator import backend
from tests.helpers.loaded_processes import run_in_loaded_process

_HERE = Path(__file__).parent / "on_device"
FILES = sorted(path.stem for path in _HERE.glob("test_*.py"))
_reason = backend.why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=f"the late device cannot be built: {_reason}")


def run_pytest(*arguments: str) -> None:
    loaded = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *loaded, *arguments]))


def run(file: str, selected: str, folder: Path) -> None:
    """Run a file's tests with the late device as their accelerator; what fails there fails here."""
    environment = os.environ | {"TEST_ON_LATE_DEVICE": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    arguments = ("-m", selected, str(_HERE / f"{file}.py"))
    code = run_in_loaded_process(run_pytest, *arguments, output=folder / "output", environment=environment)
    if selected == "full" and code == pytest.ExitCode.NO_TESTS_COLLECTED:
        pytest.skip("all of its tests are in the short suite")
    assert code == 0, (folder / "output").read_text()[-20000:]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("file", FILES)
def test_on_the_late_device(file: str, tmp_path: Path) -> None:
    run(file, "not full", tmp_path)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES)
def test_on_the_late_device_in_full(file: str, tmp_path: Path) -> None:
    run(file, "full", tmp_path)
