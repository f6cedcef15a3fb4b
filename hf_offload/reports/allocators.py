"""Which CPU memory allocator a process runs with: on a CPU it decides both speed and measured memory."""

import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.load import choose

ALLOCATORS = ("glibc-tuned", "glibc", "tcmalloc")

# Take large blocks from the heap, never give it back, grow it in large pieces: freed pages stay warm. An ordinary
# process maps and unmaps every large block, and the page faults cost a tenth of a training step.
_TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
_PRELOADABLE = ("tcmalloc", "jemalloc", "mimalloc")


def environment_with(name: str) -> dict[str, str]:
    """This process's environment, changed so that a child starts with the allocator ``name`` and no other.

    Raises :class:`OffloadConfigError` for an unknown name, and for tcmalloc when it is not installed.
    """
    choose("allocator", name, ALLOCATORS)
    environment = {key: value for key, value in os.environ.items() if key not in _TUNED}
    preload = [
        part
        for part in environment.pop("LD_PRELOAD", "").replace(" ", ":").split(":")
        if part and not any(other in part for other in _PRELOADABLE)
    ]
    if sys.platform != "linux":
        if name != ALLOCATORS[0]:
            raise OffloadConfigError(f"allocator={name!r} can be chosen on Linux only: leave the option out.")
    elif name == "glibc-tuned":
        environment |= _TUNED
    elif name == "tcmalloc":
        library = _find_tcmalloc()
        if library is None:
            raise OffloadConfigError(
                "allocator='tcmalloc' is not installed: install it (Debian and Ubuntu: libtcmalloc-minimal4, Fedora: "
                "gperftools-libs), or use allocator='glibc-tuned'."
            )
        preload.insert(0, library)
    return environment | ({"LD_PRELOAD": ":".join(preload)} if preload else {})


def current_allocator() -> str:
    """The allocator of this process: ``tcmalloc``, ``glibc-tuned``, ``glibc`` or the platform's own."""
    if sys.platform != "linux":
        return "system"
    # What is mapped, not what was asked for: a preload that fails only prints a line to stderr.
    mapped = Path("/proc/self/maps").read_text()
    for name in _PRELOADABLE:
        if f"lib{name}" in mapped:
            return name
    return "glibc-tuned" if all(os.environ.get(key) == value for key, value in _TUNED.items()) else "glibc"


def _find_tcmalloc() -> str | None:
    for name in ("tcmalloc_minimal", "tcmalloc"):
        found = ctypes.util.find_library(name)
        if found:
            return found
    # Without development files, find_library needs a compiler or the linker's cache in a form it knows.
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    for line in listing.splitlines():
        library, _, path = line.strip().partition(" => ")
        if path and library.startswith(("libtcmalloc_minimal.so", "libtcmalloc.so")):
            return path
    return None
