"""Tensors of one parameter's state that others have from ``state_dict``, or have passed to ``load_state_dict``.

In memory, they are the optimizer's own tensors, which steps change. Here they are copies: those of an earlier step are not to
be loaded.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_offload.errors import OffloadError
from hf_offload.parameters.given import GivenCopy


class GivenStates:
    """Those of the parameter called ``name``."""

    def __init__(self, name: str):
        self._name = name
        self._present: list[GivenCopy] = []  # of the state as it is
        self._past: list[GivenCopy] = []  # of what it was before steps, which would have changed them in memory
        self._former: list[GivenCopy] = []  # of a state in whose place another one has come, before its last steps

    def add(self, state: Mapping[str, Any]) -> None:
        """Others have the tensors of ``state``, which is the present one."""
        tensors = [each for each in state.values() if type(each) is Tensor and each.layout == torch.strided]
        counted = [each for each in tensors if not each.is_inference()]
        self._present = [*_alive(self._present), *map(GivenCopy, counted)]

    def replace(self) -> None:
        """Another state takes the place of the present one, whose tensors steps do not change any more."""
        self._former = [*_alive(self._former), *_alive(self._past)]
        self._present, self._past = [], []

    def step(self) -> None:
        """The present state is about to be changed.

        Raises :class:`~hf_offload.errors.OffloadError` if one of the copies was changed, which would be the state itself in
        memory.
        """
        if any(each.was_changed for each in (*self._present, *self._past)):
            raise OffloadError(
                f"A tensor of the optimizer's state of {self._name}, from state_dict() or passed to load_state_dict(), was "
                "changed in place. In memory, that would have changed the state, but this state is on a tier, and the tensor "
                "is a copy: change those of optimizer.state instead."
            )
        self._past = [*_alive(self._past), *_alive(self._present)]
        self._present = []

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise :class:`~hf_offload.errors.OffloadError` if ``state`` is not to be loaded: steps would have changed it in
        memory.
        """
        for value in state.values():
            if isinstance(value, Tensor) and any(each.shares_memory(value) for each in (*self._past, *self._former)):
                raise OffloadError(
                    f"The state of {self._name} that is to be loaded was returned by state_dict() of this optimizer, or "
                    "loaded before, and steps have changed it since. In memory, its tensors would be the optimizer's own, "
                    "with the present values, and loading them would change nothing; here, they are copies of then. To go "
                    "back to former values, load a copy: copy.deepcopy(optimizer.state_dict()), taken then."
                )


def _alive(copies: list[GivenCopy]) -> list[GivenCopy]:
    return [each for each in copies if each.is_alive]
