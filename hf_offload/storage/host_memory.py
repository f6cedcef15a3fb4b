"""The host's memory: how much there is, for this process and of it."""

import contextlib
from pathlib import Path

RAM_SHARE = 0.6
"""Of the RAM that is available, what tiers take by default: the rest is left to data loaders, checkpoints and page cache."""


def ram_bytes() -> tuple[int | None, int | None]:
    """Total and available bytes of RAM, limits of the process's control groups taken into account; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None, None
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    total, available = fields["MemTotal"], fields.get("MemAvailable", fields["MemFree"])
    for limit_file, used_file in _limits():
        with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
            limit, used = int(limit_file.read_text()), int(used_file.read_text())
            total, available = min(total, limit), min(available, max(limit - used, 0))
    return total, available


def process_bytes() -> int:
    """Bytes of RAM that this process has itself, without files that are mapped; 0 if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _limits() -> list[tuple[Path, Path]]:
    """Files with the limit and the use of each group that the process is in, whichever version of them."""
    root = Path("/sys/fs/cgroup")
    groups = [root]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                own = root / path.strip("/")
                groups += [own, *(parent for parent in own.parents if root in parent.parents)]
    return [
        *((group / "memory.max", group / "memory.current") for group in groups),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ]


def default_ram_budget(processes: int) -> int | None:
    """Bytes of RAM that one of so many processes on the machine takes where no budget is given; None if unknown.

    Page-locked memory cannot be swapped: without a limit, the end is the kernel's OOM killer.
    """
    available = ram_bytes()[1]
    return None if available is None else int(RAM_SHARE * available) // processes
