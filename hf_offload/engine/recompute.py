"""Switching activation checkpointing on for some of a model's blocks, and putting everything back.

Note: a forward that runs twice
    A plan names only blocks whose forward can run twice, as far as the measured step showed (``structure/effects.py``). A
    later step may be another one: it may pass a cache, or train a norm that was frozen. So every call is looked at before it
    is checkpointed, and is not checkpointed if it cannot be; and a recompute of a block that is not what its forward read,
    since the forward or the training has changed it, raises an error, before the optimizer sees a gradient of that step.
    Random numbers of Python and NumPy that a later step begins to draw are drawn again in its recompute, as those of PyTorch.
"""

import contextvars
import functools
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from hf_offload.checkpointing import checkpoint, in_recompute
from hf_offload.errors import RecomputeError
from hf_offload.generators import python_and_numpy, set_python_and_numpy
from hf_offload.structure.block_state import inputs_read_again, is_entered_again, read_by, rewritten_name
from hf_offload.structure.effects import blocking_argument
from hf_offload.surgery import EagerHook


class Recompute:
    """Which blocks are recomputed in backward.

    A :class:`~transformers.modeling_layers.GradientCheckpointingLayer` asks two attributes of its own in every forward; hooks
    set them for the calls that are checkpointed, and only while those run. Saved-tensor hooks that are entered around the
    block see its inputs and nothing else of it.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]):
        self._blocks = weakref.WeakValueDictionary(blocks)  # the model owns them
        self._handles: dict[str, list[RemovableHandle]] = {}
        self._frozen: dict[str, frozenset[str]] = {}

    def apply(self, names: Iterable[str]) -> None:
        """Recompute these blocks, and no others except those that the user checkpoints. Names of other units are ignored."""
        wanted = set(self._blocks) & set(names)
        for name in list(self._handles):
            if name not in wanted:
                for handle in self._handles.pop(name):
                    handle.remove()
        for name in wanted - set(self._handles):
            block = self._blocks[name]
            switch = _Switch(name, self._frozen.setdefault(name, frozenset(_frozen(block))))
            self._handles[name] = [
                block.register_forward_pre_hook(EagerHook(switch.on), with_kwargs=True),
                block.register_forward_hook(EagerHook(switch.off), always_call=True),
            ]

    def remove(self) -> None:
        """Restore every block."""
        self.apply(())


def _frozen(block: nn.Module) -> Iterable[str]:
    """Inner modules with buffers that do not train: batch norms whose statistics stay as they are."""
    return (name for name, module in block.named_modules() if module._buffers and not module.training)


class _Switch:
    """Turns checkpointing on for one call of a block."""

    _ATTRIBUTES = ("gradient_checkpointing", "_gradient_checkpointing_func")

    def __init__(self, name: str, frozen: frozenset[str]):
        self._name = name
        self._frozen = frozen  # when the block was measured
        self._before: dict[str, Any] | None = None

    def on(self, block: Any, args: Any, kwargs: Any) -> None:
        """A pre-hook."""
        self.off(block)  # an interrupted call has not done it
        if in_recompute():
            return
        if blocking_argument(args, kwargs) or not self._frozen.issubset(_frozen(block)):
            return
        self._before = {name: block.__dict__[name] for name in self._ATTRIBUTES if name in block.__dict__}
        block._gradient_checkpointing_func = functools.partial(_checkpointed, self._name, block)
        block.gradient_checkpointing = True

    def off(self, block: Any, *_: Any) -> None:
        """A forward hook."""
        before, self._before = self._before, None
        if before is None:
            return
        for name in self._ATTRIBUTES:
            if name in before:
                block.__dict__[name] = before[name]
            else:
                block.__dict__.pop(name, None)


def _checkpointed(name: str, block: nn.Module, forward: Any, *args: Any) -> Any:
    """What the layer calls instead of ``forward``, which holds the arguments by keyword."""
    inputs = inputs_read_again(args, getattr(forward, "keywords", {}))
    contexts = functools.partial(_contexts, name, block, inputs)
    # They may be others where backward is called, and are in its threads.
    variables = contextvars.copy_context()
    # What is saved inside of these has to be saved in the recompute, too.
    modes = [mode for mode in _get_current_function_mode_stack() if is_entered_again(mode)]

    def in_context(*args: Any) -> Any:
        if not in_recompute():
            return forward(*args)
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return variables.copy().run(forward, *args)

    return checkpoint(in_context, *args, context_fn=contexts)


def _contexts(name: str, block: nn.Module, inputs: Any) -> tuple["_Noted", "_Unchanged"]:
    noted = _Noted(block, inputs)
    return noted, _Unchanged(name, noted)


class _Noted(AbstractContextManager[None]):
    """Around a forward that will be recomputed: what it reads of its block and its inputs."""

    def __init__(self, block: nn.Module, inputs: Any):
        self._block = block
        self._inputs = inputs
        self._state: dict[str, Any] = {}
        self.random: tuple[Any, Any] | None = None
        """Python's and NumPy's generators as they were, where the forward has drawn from one."""

    def __enter__(self) -> None:
        self._state = read_by(self._block, self._inputs)
        self.random = python_and_numpy()

    def __exit__(self, *_: object) -> None:
        if self.random == python_and_numpy():
            self.random = None

    def changed(self) -> str:
        """The first that has changed; empty if none has."""
        return rewritten_name(self._state, read_by(self._block, self._inputs))


class _Unchanged(AbstractContextManager[None]):
    """Around a recompute: raises if the block is not what its forward read, and lets it draw the same random numbers."""

    def __init__(self, name: str, noted: _Noted):
        self._name = name
        self._noted = noted
        self._random: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        changed = self._noted.changed()
        if changed:
            raise RecomputeError(
                f"{changed} of {self._name} has been changed since its forward began, by the forward itself or before its "
                "backward, so that recomputing it would give other values. No weight has been updated with this step. Change "
                "it before the forward or after the backward, or use tier='ssd' or tier='ram', which recompute nothing."
            )
        self._random = None
        if self._noted.random is not None:
            self._random = python_and_numpy()
            set_python_and_numpy(self._noted.random)

    def __exit__(self, *_: object) -> None:
        if self._random is not None:
            set_python_and_numpy(self._random)
