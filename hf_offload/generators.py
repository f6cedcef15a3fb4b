"""Generators of random numbers: how their states are read, compared and put back."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

KINDS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
"""Types of generators."""


def state_of(generator: Any) -> Any:
    """The state of one of :data:`KINDS`: a tensor for one of PyTorch, else numbers in lists, tuples and dicts, and None for
    one that draws from the system.
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _without_arrays(generator.get_state(legacy=False))
    return _without_arrays(getattr(generator, "bit_generator", generator).state)


def set_state(generator: Any, state: Any) -> None:
    """Let a generator be as :func:`state_of` has found it."""
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    elif not isinstance(generator, random.Random):
        getattr(generator, "bit_generator", generator).state = state
    elif state is not None:
        generator.setstate(state)


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


def _without_arrays(state: Any) -> Any:
    """Lists, which are loaded anywhere and compared as a whole, instead of arrays."""
    if isinstance(state, dict):
        return {name: _without_arrays(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, np.generic)) else state
