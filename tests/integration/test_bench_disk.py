"""``hf-offload bench disk`` from the command line to its table."""

import fcntl
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_offload.bench import disk
from hf_offload.bench.disk import Comparison, Workload
from hf_offload.cli.main import app
from hf_offload.errors import OffloadConfigError
from hf_offload.parents import bound
from hf_offload.storage import disk_io
from hf_offload.storage.disk_io import DataFile, DirectIo

KIB, MIB = 1 << 10, 1 << 20
SMALL = ("--size", "4MiB", "--rounds", "2")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "RECORD_BYTES", MIB)
    monkeypatch.setattr(disk, "BLOCK_BYTES", 256 * KIB)
    with closing(DataFile(tmp_path)) as file:
        if not file.direct.usable:
            pytest.skip(f"no direct I/O under {tmp_path}: {file.direct.reason}")
    return tmp_path


def run(*words):
    return CliRunner().invoke(app, ["bench", "disk", *(str(word) for word in words)])


def check(drive, rounds):
    assert drive["size_bytes"] == 4 * MIB
    for direction in ("write", "read"):
        found = drive[direction]
        assert len(found["rounds"]) == rounds
        ratios = [each["tier_bytes_per_s"] / each["ceiling_bytes_per_s"] for each in found["rounds"]]
        assert [each["ratio"] for each in found["rounds"]] == ratios
        assert found["ratio"] == statistics.median(ratios)
        assert found["ratio_range"] == [min(ratios), max(ratios)]
        assert min(each["tier_bytes_per_s"] for each in found["rounds"]) > 0


def test_json_is_pure_and_complete(directory, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    result = run("--json", "-d", directory, "-d", other, *SMALL)
    assert result.exit_code == 0, result.stderr
    drives = json.loads(result.stdout)["drives"]
    assert [drive["directory"] for drive in drives] == [str(directory), str(other)]
    for drive in drives:
        assert drive["ceiling"] == "O_DIRECT loop"
        assert (drive["write_threads"], drive["read_threads"], drive["record_bytes"]) == (2, 4, MIB)
        check(drive, rounds=2)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert list(other.iterdir()) == []


def test_the_table_shows_every_round_and_the_median(directory):
    table = run("-d", directory, *SMALL)
    assert table.exit_code == 0
    assert "O_DIRECT loop, GB/s" in table.stdout
    assert table.stdout.count("median") == 2
    assert table.stdout.count("..") == 2


def test_the_median_ratio_is_that_of_the_rounds_not_of_the_medians():
    found = Comparison.of([(1.0, 0.5), (10.0, 9.0), (4.0, 4.0)])
    assert (found.ceiling_bytes_per_s, found.tier_bytes_per_s) == (4.0, 4.0)
    assert found.ratio == 0.9
    assert found.ratio_range == (0.5, 1.0)


def test_both_sides_move_the_same_bytes_in_turns_past_the_page_cache(directory, monkeypatch):
    passes, calls = [], {"pwritev": [], "preadv": []}
    for name, seen in calls.items():
        monkeypatch.setattr(os, name, _seen(seen, getattr(os, name)))
    workload = Workload.of(4 * MIB)
    disk.compare_drive(directory, workload, 2, passes.append)
    plain, tier = "O_DIRECT loop", "disk tier"
    assert passes == [
        f"{plain}, first write", f"{tier}, first write",
        f"{plain}, write 1/2", f"{tier}, write 1/2", f"{plain}, read 1/2", f"{tier}, read 1/2",
        f"{tier}, write 2/2", f"{plain}, write 2/2", f"{tier}, read 2/2", f"{plain}, read 2/2",
    ]  # fmt: skip
    for name, count in (("pwritev", 6), ("preadv", 4)):
        large = [(direct, size) for direct, size in calls[name] if size > 4 * KIB]  # not the probe of the drive
        assert all(direct for direct, _ in large)
        # Of every record the tier keeps less than two blocks in memory.
        assert 0.99 < sum(size for _, size in large) / (count * 4 * MIB) <= 1


def _seen(seen, real):
    def call(fd, buffers, offset):
        moved = real(fd, buffers, offset)
        seen.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), moved))
        return moved

    return call


def test_sizes_are_cut_to_whole_records_for_all_threads(directory, monkeypatch):
    monkeypatch.setattr(disk, "RECORD_BYTES", 1536 * KIB)
    workload = Workload.of(5 * MIB + 7)
    assert workload.size_bytes == 3 * MIB
    assert (workload.threads("write"), workload.threads("read")) == (2, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "many"), "size='many' is not a size"),
        (("--size", "900KiB"), "is too little.*at least 1.00 MiB"),
        (("-d", "missing"), "'missing' does not exist"),
    ],
)
def test_wrong_input_ends_with_one_message(directory, monkeypatch, words, message):
    monkeypatch.chdir(directory)
    result = run("--json", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.search(message, result.stderr)
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_full_disk_is_refused_before_anything_is_written(directory, monkeypatch):
    monkeypatch.setattr(disk, "free_disk_bytes", lambda _: 7 * MIB)
    monkeypatch.setattr(disk, "compare_drive", None)
    result = run("-d", directory, *SMALL)
    assert result.exit_code == 2
    assert "has 7.00 MiB free, and two files of 4.00 MiB need 8.00 MiB" in result.stderr


def test_every_directory_is_checked_before_the_first_is_measured(directory, monkeypatch):
    monkeypatch.setattr(disk, "compare_drive", None)
    result = run("-d", directory, "-d", directory / "missing", *SMALL)
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_tmpfs_is_refused_by_name(directory, monkeypatch):
    monkeypatch.setattr(disk, "file_system_of", lambda _: "tmpfs")
    result = run("-d", directory, *SMALL)
    assert result.exit_code == 2
    assert "is a tmpfs, which is RAM" in result.stderr


def test_a_drive_without_direct_io_is_refused_with_the_reason(directory, monkeypatch):
    monkeypatch.setattr(disk_io, "probe_direct_io", lambda *_: DirectIo(False, 1, "zfs refuses O_DIRECT"))
    with pytest.raises(OffloadConfigError, match="past the page cache: zfs refuses O_DIRECT"):
        disk.check_drives([directory], Workload.of(4 * MIB))


def test_ctrl_c_leaves_no_file_and_no_space(directory):
    words = ["-d", str(directory), "--size", "96MiB", "--rounds", "1000"]
    command = [sys.executable, "-m", "hf_offload", "bench", "disk", *words]
    with subprocess.Popen(bound(command), stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent) as process:
        try:
            _wait_for(lambda: len(_open_below(process.pid, directory)) >= 2)  # the ceiling's file and the tier's
            assert list(directory.iterdir()) == []
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert list(directory.iterdir()) == []
    assert _open_anywhere(directory) == []


def test_ctrl_c_while_a_thread_starts_closes_nothing_that_the_thread_uses(directory, monkeypatch):
    """The pool does not know a thread whose start was interrupted, and does not wait for it."""
    begun, release = threading.Event(), threading.Event()

    def write(fd, buffers, offset, move=os.pwritev):
        if "ThreadPool" not in threading.current_thread().name:  # the tier's
            return move(fd, buffers, offset)
        with memoryview(buffers[0]):  # as in the call itself
            begun.set()
            release.wait()
        return move(fd, buffers, offset)

    class Interrupted(threading.Thread):
        def start(self):
            super().start()
            if "ThreadPool" in self.name and begun.wait(10):
                threading.Timer(0.2, release.set).start()
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", write)
        patched.setattr(threading, "Thread", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            disk.compare_drive(directory, Workload.of(4 * MIB), 1)


def _wait_for(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def _open_below(pid, directory):
    found = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = str(link.readlink())
            if target.startswith(f"{directory}/"):
                found.add(target)
    except OSError:  # the process, or a descriptor of it, has gone
        pass
    return found


def _open_anywhere(directory):
    pids = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if _open_below(pid, directory)]
