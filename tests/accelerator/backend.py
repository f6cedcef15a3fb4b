"""The late device: an accelerator of PyTorch's that does everything as late as it may (see ``csrc/runtime.h``).

Importing it makes it *the* accelerator of the process, so tests that need it run in a process of their own.
"""

import hashlib
import importlib.util
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "late"
_DEVICES = 2
_HERE = Path(__file__).parent


def why_not() -> str | None:
    """Why the late device cannot be built here, or None."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "no C++ compiler"
    if not cpp_extension.is_ninja_available():
        return "no ninja"
    if sys.platform != "linux":
        return "memfd_create is Linux's"
    return None


def load() -> Any:
    """Build the late device, unless it is built already, and make it the accelerator of this process."""
    module = _built()
    if not hasattr(torch, NAME):
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _device_module())
        torch.utils.generate_methods_for_privateuse1_backend()
        # Otherwise a registered device gets new parameters from Module.to, and tied weights come apart.
        torch.__future__.set_swap_module_params_on_conversion(True)
    return module


def _built() -> Any:
    """The module, built once for these sources, this interpreter and this PyTorch, also for a copy of the whole tree."""
    sources = sorted((_HERE / "csrc").iterdir())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    folder = _HERE / ".build" / f"{sys.implementation.cache_tag}-torch{torch.__version__}-{digest[:16]}"
    complete = folder / "complete"
    if complete.exists():
        return _imported(folder / "late_device.so")
    folder.mkdir(parents=True, exist_ok=True)
    module = cpp_extension.load(
        "late_device",
        [str(path) for path in sources if path.suffix == ".cpp"],
        extra_cflags=["-O1", "-g0"],
        build_directory=str(folder),
    )
    complete.touch()  # another process may look while this one still links
    return module


def _imported(library: Path) -> Any:
    spec = importlib.util.spec_from_file_location("late_device", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _device_module() -> types.ModuleType:
    """``torch.late``: what PyTorch and accelerate call by a device's name. Random numbers are the CPU's."""
    module = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator
    members = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: _DEVICES,
        "current_device": accelerator.current_device_index,
        "device": lambda place: accelerator.device_index(torch.device(place).index),
        "set_device": accelerator.set_device_index,
        "current_stream": accelerator.current_stream,
        "synchronize": accelerator.synchronize,
        "empty_cache": accelerator.empty_cache,
        "memory_allocated": accelerator.memory_allocated,
        "max_memory_allocated": accelerator.max_memory_allocated,
        "memory_reserved": accelerator.memory_reserved,
        "max_memory_reserved": accelerator.max_memory_reserved,
        "reset_peak_memory_stats": accelerator.reset_peak_memory_stats,
        "mem_get_info": accelerator.get_memory_info,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module
