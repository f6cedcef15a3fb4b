"""One tier of every kind, for the conformance suite."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_offload.storage import disk_io
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.ram import RamTier
from hf_offload.storage.spill import SpillTier
from hf_offload.storage.tier import Tier

MIB = 1 << 20
KINDS = (
    "ram",
    "ram-checksum",
    "disk-direct",
    "disk-4k",
    "disk-buffered",
    "disk-tmpfs",
    "disk-striped",
    "disk-checksum",
    "spill",
)

Make = Callable[..., Tier]


def _tmpfs(name: str) -> Path:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("this machine has no /dev/shm to try a tmpfs on")
    directory = shm / f"hf_offload-test-{os.getpid()}-{name}"
    directory.mkdir()
    return directory


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def directories(kind: str, tmp_path: Path) -> Iterator[list[Path]]:
    """Where the tier may keep files; empty for RAM."""
    count = {"ram": 0, "ram-checksum": 0, "disk-striped": 3}.get(kind, 1)
    paths = [tmp_path / f"drive{index}" for index in range(count)]
    if kind == "disk-tmpfs":
        paths = [_tmpfs(tmp_path.name)]
    for path in paths:
        path.mkdir(exist_ok=True)
    yield paths
    if kind == "disk-tmpfs":
        paths[0].rmdir()  # fails when something was left inside


@pytest.fixture
def make(kind: str, directories: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``make(budget_bytes=None)`` gives a tier of the kind under test; all are closed afterwards."""
    probe = disk_io.probe_direct_io
    other = {"disk-4k": {"align_bytes": 4096}, "disk-buffered": {"usable": False, "align_bytes": 1}}.get(kind)
    if other is not None:
        monkeypatch.setattr(disk_io, "probe_direct_io", lambda *call: dataclasses.replace(probe(*call), **other))

    def build(budget_bytes: int | None = None) -> Tier:
        if kind.startswith("ram"):
            return RamTier(budget_bytes, arena_bytes=8 * MIB, checksum=kind == "ram-checksum")
        if kind == "disk-direct":
            tier = DiskTier(directories, budget_bytes=budget_bytes)
            if not tier.files[0].direct.usable:
                tier.close()
                pytest.skip(f"no direct I/O under {directories[0]}: {tier.files[0].direct.reason}")
            return tier
        if other is not None:
            return DiskTier(directories, budget_bytes=budget_bytes)
        if kind == "disk-tmpfs":
            tier = DiskTier(directories, budget_bytes=budget_bytes)
            assert not tier.files[0].direct.usable
            return tier
        if kind == "disk-striped":
            return DiskTier(directories, budget_bytes=budget_bytes, chunk_bytes=MIB)
        if kind == "disk-checksum":
            return DiskTier(directories, budget_bytes=budget_bytes, checksum=True)
        half = None if budget_bytes is None else budget_bytes // 2
        return SpillTier(RamTier(4 * MIB if half is None else half), DiskTier(directories, budget_bytes=half))

    with contextlib.ExitStack() as stack:

        def tracked(budget_bytes: int | None = None) -> Tier:
            tier = build(budget_bytes)
            stack.callback(tier.close)
            return tier

        yield tracked


@pytest.fixture
def tier(make: Make) -> Tier:
    return make()
