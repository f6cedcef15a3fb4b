"""Tests whose accelerator is the late device. They are run by ``test_accelerator.py``, in processes of their own."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

_MARK = "TEST_ON_LATE_DEVICE"
collect_ignore_glob = [] if os.environ.get(_MARK) else ["test_*.py"]

if os.environ.get(_MARK):
    from tests.accelerator import backend

    _late = backend.load()


@pytest.fixture
def late() -> Iterator[Any]:
    """The backend's module. A test fails if something was done that must not be."""
    _late.reseed(0)
    yield _late
    _late.fail_allocation(-1)
    _late.fail_pinning(False)
    assert _late.violations() == []
