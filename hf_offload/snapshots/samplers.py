"""What decides the order of a loader's batches, and whether a resume finds that order again.

Note: trying it out
    A sampler of an unknown class may draw from a generator that is not seen: one of its module, or of a closure. So it is
    iterated twice before the first batch, from the same states of all that is seen. If that gives two orders, something else
    decides. A sampler whose one order is tried stays as it was: all that is seen is put back.
"""

import hashlib
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from hf_offload.generators import KINDS, are_equal, process_states, set_process_states, set_state, state_of

_COUNTERS = ("iteration", "epoch")
"""Of loaders of accelerate, and of samplers that shuffle by the number of the epoch."""

_TRIED_ITEMS = 256
_KNOWN = ("torch.", "accelerate.", "transformers.")
"""Their samplers draw from the process's generators when an iteration begins, or from an attribute."""

_BY_EPOCH = frozenset(
    {
        "SequentialSampler", "BatchSampler", "DistributedSampler", "_InfiniteConstantSampler", "SeedableRandomSampler",
        "BatchSamplerShard", "SkipBatchSampler",
    }
)  # fmt: skip
"""Classes of torch and accelerate whose order is that of the number of an epoch, or always the same."""


def parts_of(loader: Any) -> list[Any]:
    """The loader and its samplers, in wrappers such as accelerate's, and those that samplers have as attributes."""
    found: list[Any] = []
    waiting = [loader]
    while waiting:
        part = waiting.pop(0)
        if part is None or any(part is each for each in found):
            continue
        found.append(part)
        waiting += [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
        waiting += [value for value in getattr(part, "__dict__", {}).values() if isinstance(value, Sampler)]
    return found


def _samplers_of(loader: Any) -> list[Any]:
    """A loader takes anything with a length that can be iterated."""
    return [part for part in parts_of(loader) if part is not loader and not isinstance(part, DataLoader)]


def states_of(loader: Any) -> list[dict[str, dict[str, Any]]]:
    """By part: its generators, and what it counts."""
    states, samplers = [], _samplers_of(loader)
    for part in parts_of(loader):
        own = getattr(part, "__dict__", {})  # a list of batches has none
        is_own = _is_unknown(part) and any(part is one for one in samplers)
        names = own if is_own else [name for name in _COUNTERS if name in own]
        states.append(
            {
                "numbers": {name: own[name] for name in names if type(own[name]) in (int, float, bool)},
                "generators": {name: state_of(value) for name, value in own.items() if isinstance(value, KINDS)},
            }
        )
    return states


def restore(loader: Any, states: list[dict[str, dict[str, Any]]]) -> None:
    """Let the parts be as :func:`states_of` has found them."""
    for part, state in zip(parts_of(loader), states, strict=True):
        for name, value in state["numbers"].items():
            setattr(part, name, value)
        for name, value in state["generators"].items():
            generator = vars(part).get(name)
            if isinstance(generator, KINDS):  # else it is made, and seeded, when the next epoch begins
                set_state(generator, value)


def unrepeatable(loader: Any) -> str | None:
    """Why the order of the epoch that begins could not be found again from generators and :func:`states_of`, in words."""
    for part in _samplers_of(loader):
        if not _is_unknown(part):
            continue
        if hasattr(part, "__next__"):
            return f"{_name(part)} is an iterator, and what it gave before is gone"
        generators, states = process_states(), states_of(loader)
        items, draws_later = _tried(part)
        set_process_states(generators)
        restore(loader, states)
        if draws_later:
            set_process_states(generators)
            return f"{_name(part)} draws from the generators of the process, item by item, while the training draws from them"
        again, _ = _tried(part)
        set_process_states(generators)
        restore(loader, states)
        if items != again:
            return (
                f"{_name(part)} has another order each time, and no generator or number among its attributes decides it"
            )
    return None


def data_of(loader: Any) -> dict[str, str]:
    """Digests of what samplers of unknown classes have as attributes that is neither number nor generator, by name: an order
    that follows from it is found again as long as it does not change.
    """
    return {
        f"{name} of {_name(part)}": hashlib.sha256(_bytes_of(value)).hexdigest()
        for part in _samplers_of(loader)
        if _is_unknown(part)
        for name, value in getattr(part, "__dict__", {}).items()
        if isinstance(value, (list, tuple, dict, set, np.ndarray, torch.Tensor))
    }


def unlike_each_epoch(loader: Any) -> str | None:
    """Which sampler has another order each time, where the number of the epoch is all that a resume knows; None if none."""
    for part in _samplers_of(loader):
        if not _is_unknown(part) and type(part).__name__ in _BY_EPOCH:
            continue
        generators, states = process_states(), states_of(loader)
        items, again = _tried(part)[0], _tried(part)[0]
        set_process_states(generators)
        restore(loader, states)
        if items != again:
            return f"{_name(part)} has another order each time, which the number of an epoch does not decide"
    return None


def _tried(sampler: Iterable[Any]) -> tuple[str, bool]:
    """The first items in words, and whether those behind the first one were drawn from the process's generators."""
    iterator = iter(sampler)
    items = list(itertools.islice(iterator, 1))
    before = process_states()
    items += itertools.islice(iterator, _TRIED_ITEMS)
    draws_later = not are_equal(process_states(), before)
    getattr(iterator, "close", lambda: None)()  # what it does at its end is done now
    return repr(items), draws_later


def _is_unknown(part: Any) -> bool:
    return not f"{type(part).__module__}.".startswith(_KNOWN)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()


def _name(part: Any) -> str:
    return f"the sampler {type(part).__qualname__}"
