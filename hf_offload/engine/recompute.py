"""Switching activation checkpointing on for some of a model's blocks, and putting everything back.

Note: the contract
    A forward may run twice if its author says so: the block is a
    :class:`~transformers.modeling_layers.GradientCheckpointingLayer`, or of a class named in ``recompute_blocks``. Checked
    are calls with a cache, buffers that the forward writes to, and versions of parameters, buffers and inputs. PyTorch
    compares the metadata of what both runs save. Everything else that a forward reads or writes is the author's promise.
"""

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hf_offload.checkpointing import checkpoint, in_recompute
from hf_offload.errors import RecomputeError
from hf_offload.generators import process_states, set_process_states
from hf_offload.surgery import EagerHook
from hf_offload.tensors import are_transformed, can_be_followed

Versions = Mapping[str, list[tuple[int, int | None]]]
"""Name -> id and version of each tensor."""

# What a layer of transformers empties before it is checkpointed.
_CACHES = ("past_key_values", "layer_past")


def why_not_twice(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Why a block's call with these arguments cannot run a second time; empty if it can."""
    if are_transformed():
        return "it is called inside of a transform of torch.func, or of forward-mode differentiation"
    if kwargs.get("use_cache"):
        return "it is called with use_cache=True"
    named = {f"argument {index}": value for index, value in enumerate(args)} | dict(kwargs)
    for name, value in named.items():
        if type(value).__name__.endswith("Cache") or (name in _CACHES and value is not None):
            return f"it receives a cache as {name}"
        for leaf in tree_leaves(value):
            # Checkpointing saves no tensor of inference mode, and takes a meta tensor's device for that of random numbers.
            if isinstance(leaf, torch.Tensor) and (leaf.is_meta or not can_be_followed(leaf)):
                return f"it receives a tensor without data or without a version as {name}"
    return ""


def versions_of(named: Iterable[tuple[str, Any]]) -> Versions:
    """Versions of tensors, or of those in what is named."""
    return {
        name: [
            (id(leaf), leaf._version if can_be_followed(leaf) else None)
            for leaf in tree_leaves(value)
            if isinstance(leaf, torch.Tensor)
        ]
        for name, value in named
    }


def changed_name(before: Versions, now: Versions, *, replaced: bool = False) -> str:
    """The first name of a tensor that has changed; empty if there is none. With ``replaced``, a tensor whose place another
    one has taken is passed over: sharding replaces parameters by others with the same values.
    """
    for name, one in before.items():
        other = now.get(name, one)
        if one != other and not (replaced and [key for key, _ in one] != [key for key, _ in other]):
            return name
    return ""


class Recompute:
    """Which blocks are recomputed in backward.

    A :class:`~transformers.modeling_layers.GradientCheckpointingLayer` asks two attributes of its own in every forward; hooks
    set them for the calls that are checkpointed, and only while those run. Saved-tensor hooks that are entered around the
    block see its inputs and nothing else of it.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]):
        self._blocks = weakref.WeakValueDictionary(blocks)  # the model owns them
        self._handles: dict[str, list[RemovableHandle]] = {}

    def apply(self, names: Iterable[str]) -> None:
        """Recompute these blocks, and no others except those that the user checkpoints. Names of other units are ignored."""
        wanted = set(self._blocks) & set(names)
        for name in list(self._handles):
            if name not in wanted:
                for handle in self._handles.pop(name):
                    handle.remove()
        for name in wanted - set(self._handles):
            block, switch = self._blocks[name], _Switch(name)
            self._handles[name] = [
                block.register_forward_pre_hook(EagerHook(switch.on), with_kwargs=True),
                block.register_forward_hook(EagerHook(switch.off), always_call=True),
            ]

    def remove(self) -> None:
        """Restore every block."""
        self.apply(())


class _Switch:
    """Turns checkpointing on for one call of a block."""

    _ATTRIBUTES = ("gradient_checkpointing", "_gradient_checkpointing_func")

    def __init__(self, name: str):
        self._name = name
        self._before: dict[str, Any] | None = None

    def on(self, block: Any, args: Any, kwargs: Any) -> None:
        """A pre-hook."""
        self.off(block)  # an interrupted call has not done it
        if in_recompute() or why_not_twice(args, kwargs):
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
    # Tensors by position are not kept here: checkpointing saves them as autograd does, with their versions.
    named = {f"argument {index}": value for index, value in enumerate(args) if not isinstance(value, torch.Tensor)}
    read = functools.partial(_read, block, named | getattr(forward, "keywords", {}))
    before = read()
    # Also those that checkpointing leaves out: of the device where all tensors come by keyword, Python's and NumPy's.
    generators = process_states()
    kernels = _cur_sdpa_kernel_backends(with_priority=True)
    # They may be others where backward is called, and are in its threads.
    variables = contextvars.copy_context()
    # What is saved inside of these has to be saved in the recompute, too.
    modes = [mode for mode in _get_current_function_mode_stack() if getattr(mode, "is_entered_again", False)]

    def run(*args: Any) -> Any:
        if not in_recompute():
            return forward(*args)
        for one, now, sharded in zip(before, read(), (_may_be_sharded(), False), strict=True):
            changed = changed_name(one, now, replaced=sharded)
            if changed:
                raise RecomputeError(
                    f"{changed} of {name} has been changed since its forward began, by the forward itself or before its "
                    "backward, so that recomputing it would give other values. No weight has been updated with this step. "
                    "Change it before the forward or after the backward, or use tier='ssd' or tier='ram', which recompute "
                    "nothing."
                )
        with _drawing(generators), sdpa_kernel(kernels, set_priority=True), contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return variables.copy().run(forward, *args)

    return checkpoint(run, *args)


def _read(block: nn.Module, inputs: Mapping[str, Any]) -> tuple[Versions, Versions]:
    """What a recompute reads once more: the block's parameters; its buffers and ``inputs``."""
    others = (*block.named_buffers(), *((f"the input {name}", value) for name, value in inputs.items()))
    return versions_of(block.named_parameters()), versions_of(others)


def _may_be_sharded() -> bool:
    """Whether there are several processes that could share parameters."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextlib.contextmanager
def _drawing(states: Mapping[str, Any]) -> Iterator[None]:
    """Inside, generators draw what they drew after ``states``; then they go on as if nothing had been drawn."""
    own = process_states()
    set_process_states(states)
    try:
        yield
    finally:
        set_process_states(own)
