"""How much memory optimizers hold: whichever steps, and whenever what it keeps comes."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from hf_offload.optimizers.streamed import StreamedState
from hf_offload.tensors import nbytes_of


class OptimizerState:
    """The state on ``device`` of all optimizers that step from now on, until :meth:`close`.

    Momenta come with an optimizer's first step, which may be later than the first step of a run: a gradient scaler leaves
    steps out, a second optimizer begins later.
    """

    def __init__(self, device: torch.device):
        self._device = device
        # No callbacks: Ctrl-C would get lost in one that is not of C (see interrupts.py).
        self._stepped: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._handle = register_optimizer_step_post_hook(self._note)

    def close(self) -> None:
        """Look at no more steps. Idempotent."""
        self._handle.remove()

    def nbytes(self) -> int:
        """Bytes that they hold now. Step counters are left out."""
        # By storage, whose object lives as long as it does: an optimizer inside of another one has the same state.
        found: dict[int, int] = {}
        for key, reference in list(self._stepped.items()):
            optimizer = reference()
            if optimizer is None:
                del self._stepped[key]
                continue
            for tensor in state_of(optimizer):
                if tensor.dim() > 0 and tensor.device == self._device:
                    found[id(tensor.untyped_storage())] = nbytes_of(tensor)
        return sum(found.values())

    def _note(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped[id(optimizer)] = weakref.ref(optimizer)


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of its state, also those in lists. Not among them: what is on a tier, and sparse ones."""
    state = optimizer.state
    values = state.resident() if isinstance(state, StreamedState) else list(state.values())
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)


def missing_state(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that weights which have had no gradient yet will have, by what the others have of it."""
    if isinstance(optimizer.state, StreamedState):
        return 0  # it goes to the tier as it comes
    with_state = without = state = 0
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        found = optimizer.state.get(parameter)
        if found:
            with_state += nbytes_of(parameter)
            state += sum(nbytes_of(leaf) for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
        elif parameter.requires_grad and parameter.grad is None:
            without += nbytes_of(parameter)
    return without * state // max(1, with_state)
