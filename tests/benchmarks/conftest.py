"""What tests of the benchmarks share."""

import subprocess
import types

import pytest

from tests.helpers.loaded_processes import run_python


@pytest.fixture
def loaded_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way runs in a process of its own that has loaded the libraries, and has the allocator of the tests."""
    like_subprocess = types.SimpleNamespace(run=run_python, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("benchmarks.cells.subprocess", like_subprocess)
