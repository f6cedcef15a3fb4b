"""What the Linux kernel limits and counts: the memory of a group of processes, swap, and transfers of drives."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

NO_LIMIT = -1


@contextlib.contextmanager
def memory_group() -> Iterator[Path]:
    """A group within this process's own, removed at the end. Raises :class:`OSError` where that is not allowed.

    Source: the kernel's admin-guide/cgroup-v1/memory.rst.
    """
    own = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line]
    if not own:
        raise OSError("memory cannot be limited: this process is in no memory group of cgroup v1.")
    group = Path("/sys/fs/cgroup/memory" + own[0]) / f"benchmark-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        group.rmdir()


def in_group(group: Path, command: list[str]) -> list[str]:
    """The command that runs ``command`` in a group."""
    return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]


def limit_memory(group: Path, n_bytes: int) -> None:
    """Memory beyond the limit is swapped or written to its file; where that is impossible, the process is killed."""
    (group / "memory.limit_in_bytes").write_text(str(n_bytes))


def group_limit(group: Path) -> int:
    """The limit in bytes."""
    return int((group / "memory.limit_in_bytes").read_text())


def reset_group_peak(group: Path) -> None:
    """Begin again with :func:`group_peak`."""
    (group / "memory.max_usage_in_bytes").write_text("0")


def group_peak(group: Path) -> int:
    """The group's most bytes of anonymous memory and page cache."""
    return int((group / "memory.max_usage_in_bytes").read_text())


@contextlib.contextmanager
def swap_file(folder: Path, n_bytes: int) -> Iterator[None]:
    """A swap file of the whole machine. Raises :class:`OSError` where that is not allowed."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:  # readable by its owner alone
        os.posix_fallocate(file.fileno(), 0, n_bytes)
        _call("mkswap", file.name)
        _call("swapon", file.name)
        try:
            yield
        finally:
            _call("swapoff", file.name)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()}")


def drive_bytes() -> int:
    """Bytes that this process has read from and written to drives so far, and all bytes swapped."""
    process = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    machine = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    swapped = int(machine["pswpin"]) + int(machine["pswpout"])
    return int(process["read_bytes"]) + int(process["write_bytes"]) + swapped * os.sysconf("SC_PAGE_SIZE")
