"""Which CPU memory allocator a process runs with: on a CPU it decides both speed and the memory a run holds.

glibc maps every large block afresh and gives it back when it is freed, so each step pays a page fault for every 4 KiB of
activations: a tenth of the step and more. Told to take large blocks from its heap and never to trim it, it is as fast as
tcmalloc, but fragments: headers keep freed blocks from adding up to larger ones, and the heap grows to twice what is in
use. tcmalloc hands out whole pages and has neither fault, so it is preferred where it is installed; mimalloc, which the
package ``cmeel-mimalloc`` brings as a wheel, is next. Either has to be there when a process starts; the commands start
themselves again with it. A running interpreter can only be tuned.
"""

import contextlib
import ctypes
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.environment import ALLOCATOR_VARIABLE, ALLOCATORS
from hf_offload.settings.load import choose

logger = logging.getLogger(__name__)

# Blocks come from the heap, which is never trimmed and grows in large pieces. Without glibc's per-thread caches the scraps
# that aligned blocks leave behind are merged again: of two gigabytes of heap that saved a third.
_TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(16 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
}
# Freed pages stay mapped. tcmalloc takes whichever free block fits best, given back to the kernel or not; if it gives none
# back, it has no reason to touch new pages while warm ones are free, and what a run holds stops growing.
_KEEP_PAGES = {"TCMALLOC_RELEASE_RATE": "0"}
# Freed pages go back at once. Of the settings compared in docs/measured.md, "CPU allocators", it has the lowest
# peak: pages that wait to be returned do not fit the next tensor.
_MIMALLOC = {"MIMALLOC_PURGE_DELAY": "0"}
_SETTINGS = _TUNED | _KEEP_PAGES | _MIMALLOC
_MIMALLOC_PACKAGE = "cmeel-mimalloc"
_PRELOADABLE = ("tcmalloc", "jemalloc", "mimalloc")

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_NEVER_TRIM = -1
_TOP_PAD_BYTES = 16 << 20


def environment_with(name: str) -> dict[str, str]:
    """This process's environment, changed so that a child starts with the allocator ``name`` and no other.

    ``"auto"`` is the :func:`best_allocator`, with the settings that suit offloading. ``"tcmalloc"``, ``"mimalloc"`` and
    ``"glibc"`` are these as they come. Raises :class:`~hf_offload.errors.OffloadConfigError` for an unknown name, and for a
    library that is not installed.
    """
    choose("allocator", name, ALLOCATORS)
    environment = {key: value for key, value in os.environ.items() if key not in _SETTINGS}
    environment[ALLOCATOR_VARIABLE] = name
    preload = [
        part
        for part in environment.pop("LD_PRELOAD", "").replace(" ", ":").split(":")
        if part and not any(other in part for other in _PRELOADABLE)
    ]
    if sys.platform != "linux":
        if name != "auto":
            raise OffloadConfigError(f"allocator={name!r} can be chosen on Linux only: leave the option out.")
        return environment
    chosen = best_allocator() if name == "auto" else name
    if chosen in _LIBRARIES:
        find, settings, install = _LIBRARIES[chosen]
        library = find()
        if library is None:
            raise OffloadConfigError(
                f"allocator={chosen!r} is not installed: {install}, or use allocator='glibc-tuned'."
            )
        preload.insert(0, library)
        environment |= settings if name == "auto" else {}
    elif chosen == "glibc-tuned":
        environment |= _TUNED
    return environment | ({"LD_PRELOAD": ":".join(preload)} if preload else {})


def best_allocator() -> str:
    """What ``"auto"`` stands for: the first of ``tcmalloc``, ``mimalloc`` that is installed, otherwise ``glibc-tuned``."""
    if sys.platform != "linux":
        return "system"
    return next((name for name, (find, _, _) in _LIBRARIES.items() if find() is not None), "glibc-tuned")


def current_allocator() -> str:
    """The allocator of this process: ``tcmalloc``, ``glibc-tuned``, ``glibc``, another preloaded one or the system's."""
    if sys.platform != "linux":
        return "system"
    # What is mapped, not what was asked for: a preload that fails only prints a line to stderr.
    mapped = Path("/proc/self/maps").read_text()
    for name in _PRELOADABLE:
        if f"lib{name}" in mapped:
            return name
    return "glibc-tuned" if all(os.environ.get(key) == value for key, value in _TUNED.items()) else "glibc"


def restart_with_allocator() -> None:
    """Start this command again with the best allocator, unless one was chosen already or a GPU does the work.

    Returns if there is nothing to do; otherwise it does not return.
    """
    if sys.platform != "linux" or os.environ.get(ALLOCATOR_VARIABLE) or current_allocator() != "glibc":
        return
    import torch

    if torch.accelerator.is_available():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "hf_offload", *sys.argv[1:]], environment_with("auto"))


def tune_running_allocator() -> str:
    """Make glibc's allocator keep freed blocks; leave any other allocator alone. Returns what is in use."""
    name = current_allocator()
    if name != "glibc":
        return name
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return "system"  # musl
    done = libc.mallopt(_M_MMAP_MAX, 0)
    done &= libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
    done &= libc.mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
    return "glibc with a heap that is kept" if done else name


def release_free_memory() -> None:
    """Ask the C allocator, tcmalloc, mimalloc or glibc's, to give free memory back to the kernel."""
    process = ctypes.CDLL(None)
    # glibc's function is there in any process, also when another allocator does the work.
    for name, arguments in (("MallocExtension_ReleaseFreeMemory", ()), ("mi_collect", (1,)), ("malloc_trim", (0,))):
        if hasattr(process, name):
            getattr(process, name)(*arguments)
            return


def say_what_is_better() -> None:
    """Log once in a process on glibc what another allocator would gain and how to start with it, unless one was chosen, by a
    command or with ``HF_OFFLOAD_ALLOCATOR``.
    """
    global _said
    if _said or os.environ.get(ALLOCATOR_VARIABLE) or current_allocator() != "glibc":
        return
    _said = True
    install = "`pip install 'hf-offload[cpu]'` brings one; then start" if best_allocator() == "glibc-tuned" else "Start"
    logger.warning(
        "glibc's heap fragments, which hides part of the memory that offloading frees on a CPU. Other allocators do not. %s "
        "with `hf-offload launch SCRIPT`.",
        install,
    )


_said = False


def find_tcmalloc() -> str | None:
    """The shared library to preload, if tcmalloc is installed."""
    return _installed_library("libtcmalloc_minimal.so", "libtcmalloc.so")


def _installed_library(*names: str) -> str | None:
    """A library of the linker's cache. ``ctypes.util.find_library`` would also start compilers, and write temporary files."""
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    try:
        listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    for line in listing.splitlines():
        library, _, path = line.strip().partition(" => ")
        if path and library.startswith(names):
            return path
    return None


def find_mimalloc() -> str | None:
    """The shared library to preload, if mimalloc is installed: that of the wheel, otherwise the system's."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        package = importlib.metadata.distribution(_MIMALLOC_PACKAGE)
        for file in package.files or ():
            path = str(package.locate_file(file))
            # LD_PRELOAD is a list separated by blanks and colons, and knows no quotes.
            if file.name == "libmimalloc.so" and Path(path).is_file() and not set(path) & set(": \t\n"):
                return path
    return _installed_library("libmimalloc.so")


# Name -> how to find its library, its settings for offloading, what to install; the best first.
_LIBRARIES: dict[str, tuple[Callable[[], str | None], dict[str, str], str]] = {
    "tcmalloc": (
        lambda: find_tcmalloc(),
        _KEEP_PAGES,
        "install it (Debian and Ubuntu: libtcmalloc-minimal4, Fedora: gperftools-libs)",
    ),
    "mimalloc": (lambda: find_mimalloc(), _MIMALLOC, "pip install 'hf-offload[cpu]'"),
}
