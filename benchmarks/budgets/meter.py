"""Live bytes of a process, counted by a preloaded library in every allocation of PyTorch's, and by no part of the package."""

import ctypes
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

METERED = "BENCHMARKS_METERED"
"""Variable that is set in the environment of a process which is counted."""


class Meter:
    """The counter of this process, which began with :func:`metered`."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self.live = library.meter_live
        self.peak = library.meter_peak
        self.live.restype = self.peak.restype = ctypes.c_longlong


def metered(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """``environment`` for a process that is counted. The library is compiled into ``folder``."""
    library = folder / "meter.so"
    source = Path(__file__).with_name("meter.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    before = [environment["LD_PRELOAD"]] if environment.get("LD_PRELOAD") else []
    return {**environment, "LD_PRELOAD": ":".join([str(library), *before]), METERED: "1"}


def is_metered() -> bool:
    """Whether this process is counted."""
    return METERED in os.environ
