"""The process's generators of random numbers: how their states are read, compared and put back."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def process_states(all_devices: bool = False) -> dict[str, Any]:
    """The states of Python's, NumPy's and PyTorch's own generators, as a Trainer keeps them: that of the current accelerator
    by the name of its type, or a list of all.
    """
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  the global one, as libraries use it
        "cpu": torch.random.get_rng_state(),
    }
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        module = torch.get_device_module(device)
        states[device.type] = module.get_rng_state_all() if all_devices else module.get_rng_state()
    return states


def set_process_states(states: Mapping[str, Any]) -> None:
    """Let the generators be as :func:`process_states` has found them."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002  the global one, as libraries use it
    torch.random.set_rng_state(states["cpu"])
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in states:
        module, state = torch.get_device_module(device), states[device.type]
        (module.set_rng_state if isinstance(state, Tensor) else module.set_rng_state_all)(state)


def are_equal(some: Any, others: Any) -> bool:
    """Whether two states, or two of :func:`process_states`, are the same."""
    if isinstance(some, dict):
        return some.keys() == others.keys() and all(are_equal(value, others[key]) for key, value in some.items())
    if isinstance(some, (tuple, list)):
        return len(some) == len(others) and all(map(are_equal, some, others))
    if isinstance(some, Tensor):
        return torch.equal(some, others)
    return bool(np.array_equal(some, others))
