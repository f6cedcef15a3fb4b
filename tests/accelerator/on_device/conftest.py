"""Tests whose accelerator is the late device. They are run by ``test_accelerator.py``, in processes of their own."""

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

_MARK = "TEST_ON_LATE_DEVICE"
collect_ignore_glob = [] if os.environ.get(_MARK) else ["test_*.py"]

if os.environ.get(_MARK):
    from tests.accelerator import backend

    _late = backend.load()


def pytest_collection_finish() -> None:
    """Tests look again and again for what stays behind; what was imported need not be looked through each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The backend's module. A test fails if something was done that must not be."""
    # The device counts how often it is asked, and does nothing while a thread sleeps.
    monkeypatch.setattr("hf_offload.engine.device._LONGEST_PAUSE_S", 20e-6)
    monkeypatch.setattr("hf_offload.plan.rules.RING_BYTES", 4 << 20)  # all of it is poisoned first
    _late.reseed(0)
    yield _late
    _late.fail_allocation(-1)
    _late.fail_pinning(False)
    assert _late.violations() == []


@pytest.fixture
def nothing_stays_behind() -> Iterator[None]:
    gc.collect()
    before = [torch.accelerator.memory_allocated(index) for index in range(2)]
    yield
    for _ in range(100):  # a thread closes what a session leaves
        gc.collect()
        if [torch.accelerator.memory_allocated(index) for index in range(2)] == before:
            return
        time.sleep(0.02)
    assert [torch.accelerator.memory_allocated(index) for index in range(2)] == before
