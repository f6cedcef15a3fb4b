"""What a process is made of beside its objects: the attributes of libraries, handlers, hooks, the environment."""

import atexit
import collections
import contextlib
import ctypes
import functools
import logging
import os
import signal
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

LIBRARIES = {"torch", "transformers", "accelerate", "peft", "os", "signal", "threading", "logging", "copyreg", "pickle"}
_forks = 0
_register_at_fork = os.register_at_fork


def _counted_register_at_fork(**handlers: Any) -> None:
    global _forks
    _forks += 1
    _register_at_fork(**handlers)


os.register_at_fork = _counted_register_at_fork  # handlers cannot be listed


def state() -> dict[str, Any]:
    """Name -> value, compared by identity where it is a function or a class."""
    found: dict[str, Any] = {
        "fork handlers": _forks,
        "mallopt": _large_blocks_are_mapped(),
        "atexit": atexit._ncallbacks(),
        "sys.meta_path": list(sys.meta_path),
        "sys.path_hooks": list(sys.path_hooks),
        "environment": dict(os.environ),
        "working directory": Path.cwd(),
        "warnings.filters": list(warnings.filters),
        "sys.exit": sys.exit,
        "sys.hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.gettrace(), sys.getprofile()),
        "torch.default": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
        "torch.modes": torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
        "torch.saved_tensors_hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
    }
    for number in sorted(signal.valid_signals()):
        with contextlib.suppress(ValueError, OSError):
            found[f"signal.{number}"] = signal.getsignal(number)
    for name in ("", "hf_offload", "transformers", "accelerate", "torch"):
        log = logging.getLogger(name)
        found[f"logging.{name}"] = (list(log.handlers), log.level, log.propagate, log.disabled, list(log.filters))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES and isinstance(module, types.ModuleType):
            for attribute, value in list(vars(module).items()):
                if attribute.startswith("__"):
                    continue
                _note(found, f"{name}.{attribute}", value)
                if isinstance(value, type) and value.__module__ == name:
                    for member, own in list(vars(value).items()):
                        _note(found, f"{name}.{attribute}.{member}", own)
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """What is not as it was. Of a container that several modules have, the longest name."""
    found: dict[Any, str] = {}
    for name, value in now.items():
        if isinstance(value, _Ours):
            changed, key = value != before.get(name, _Ours(0, [])), value.of
        else:  # what is new may be the library's own, and loaded on first use
            changed, key = (value != before[name] if name in before else _is_ours(value)), name
        if changed:
            found[key] = max(found.get(key, ""), name, key=lambda name: (len(name.split(".")), name))
    return set(found.values()) | (before.keys() - now.keys())


class _Ours:
    """The entries of a container that are this package's."""

    def __init__(self, of: int, entries: list[Any]):
        self.of = of
        self._entries = entries

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ours) and list(map(id, self._entries)) == list(map(id, other._entries))

    __hash__ = None


def _note(found: dict[str, Any], name: str, value: Any) -> None:
    if type(value) in (dict, collections.OrderedDict):
        found[name] = _Ours(id(value), [entry for entry in list(value.values()) if _is_ours(entry)])
    elif type(value) in (list, set):
        found[name] = _Ours(id(value), [entry for entry in list(value) if _is_ours(entry)])
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property)):
        found[name] = value


_PLAIN = {str, int, float, bool, bytes, tuple, list, dict, type(None), torch.dtype}


def _is_ours(value: Any) -> bool:
    if type(value) in _PLAIN:
        return False
    if isinstance(value, functools.partial):
        return _is_ours(value.func)
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        return _is_ours(value.__func__)
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__")).startswith("hf_offload")
    return (value if isinstance(value, type) else type(value)).__module__.startswith("hf_offload")


class _Mallinfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def _large_blocks_are_mapped() -> bool:
    """Whether glibc maps a block of 64 MiB afresh, as it does unless it was told otherwise."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallinfo2.restype = _Mallinfo
    before = libc.mallinfo2().hblks
    block = libc.malloc(ctypes.c_size_t(64 << 20))
    mapped = libc.mallinfo2().hblks > before
    libc.free(block)
    return mapped
