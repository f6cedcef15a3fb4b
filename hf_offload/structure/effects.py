"""Side effects of a block's forward: a block that has any cannot be recomputed in backward.

Activation checkpointing runs a forward twice. That gives the same bits only if the second run finds what the first one found
and leaves nothing behind: no statistics or counters updated twice, no list with twice as many entries, no input changed in
place, no random numbers drawn from a generator that checkpointing does not rewind. What a block does is found by comparing
its state before and after one call, and by looking at every operation in between that writes.
"""

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hf_offload.checkpointing import in_recompute
from hf_offload.structure.block_state import changed_name, inputs_read_again, read_by, rewritten_name, state_of
from hf_offload.structure.reach import MOST_LEVELS, PLAIN, UNKNOWN
from hf_offload.surgery import EagerHook
from hf_offload.tensors import are_transformed, can_be_followed, has_storage

# What a layer of transformers empties before it is checkpointed.
_CACHES = ("past_key_values", "layer_past")


def blocking_argument(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """Why a call with these arguments cannot be recomputed; empty if it can.

    Layers of transformers drop caches from a call that is checkpointed, without an error. An object of a class that is not
    known may hold something that the forward changes.
    """
    if are_transformed():
        return "it is called inside of a transform of torch.func, or of forward-mode differentiation"
    if kwargs.get("use_cache"):
        return "it is called with use_cache=True"
    for name in _CACHES:
        if kwargs.get(name) is not None:
            return f"it receives {name}"
    named = {f"argument {index}": value for index, value in enumerate(args)} | dict(kwargs)
    for name, value in named.items():
        unknown = next(_unknown(value), None)
        if isinstance(unknown, torch.Tensor):
            return f"it receives a tensor without data or without a version as {name}"
        if unknown is not None:
            return f"it receives a {type(unknown).__name__} as {name}"
    return ""


def _unknown(value: Any, levels: int = MOST_LEVELS) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        # Checkpointing can save no tensor of inference mode, and takes a meta tensor's device for that of its random numbers.
        if value.is_meta or not can_be_followed(value):
            yield value
        return
    if isinstance(value, PLAIN) or type(value).__module__.startswith("torch.nn.attention"):
        return
    if levels and isinstance(value, dict):
        for one in value.values():
            yield from _unknown(one, levels - 1)
    elif levels and isinstance(value, (list, tuple)):
        for one in value:
            yield from _unknown(one, levels - 1)
    else:
        yield value


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a block, and what it has read."""

    name: str
    block: "weakref.ref[nn.Module]"
    inputs: tuple[list[Any], Mapping[str, Any]]
    read: dict[str, Any]


class Effects:
    """Watches calls of blocks under a dispatch mode that reports every operation to :meth:`ran`.

    Attributes:
        found: Name of a block -> why it cannot be recomputed.
        changed: Names of those among them that were as their forward left them in all but this: something outside of it has
            changed what it read, before backward began. That may happen in every step, or once (a loss function of
            transformers writes the kind of its problem into the model's config in the first step).
    """

    def __init__(self, device: torch.device) -> None:
        self.found: dict[str, str] = {}
        self.changed: set[str] = set()
        self._device = device
        self._block = ""
        self._state: dict[str, Any] = {}
        self._writes = ""
        self._own: set[int] = set()  # ids of storages that the running call has made
        self._calls: list[_Call] = []  # whose backward has not begun
        self.is_watching = True

    def watch(self, blocks: Mapping[str, nn.Module]) -> Iterator[RemovableHandle]:
        """Follow the calls of these blocks until the handles are removed."""
        for name, block in blocks.items():
            enter, leave = functools.partial(self._enter, name), functools.partial(self._leave, name)
            yield block.register_forward_pre_hook(EagerHook(enter), with_kwargs=True)
            yield block.register_forward_hook(EagerHook(leave), with_kwargs=True, always_call=True)

    def _enter(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        if in_recompute() or not block.training or not self.is_watching:
            return
        self._block, self._writes = name, ""
        self._own.clear()
        self._note(blocking_argument(args, kwargs))
        self._state = {} if name in self.found else state_of(block, (args, kwargs), values=True)
        for why, _ in self._state.get(UNKNOWN, ()):
            self._note(f"its code reaches {UNKNOWN} ({why})")

    def _leave(self, name: str, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if in_recompute() or self._block != name:
            return
        if self._state and name not in self.found:
            changed = changed_name(self._state, state_of(block, (args, kwargs), values=True))
            self._note(f"its forward changes {changed}" if changed else self._writes)
        if name not in self.found:
            # What requires a gradient may be large, and would be kept alive.
            few = {key: value for key, value in kwargs.items() if not getattr(value, "requires_grad", False)}
            inputs = inputs_read_again(args, few)
            self._calls.append(_Call(name, weakref.ref(block), inputs, read_by(block, inputs)))
        self._block, self._state = "", {}

    def backward_begins(self) -> None:
        """See whether blocks and their inputs are still what forwards have read."""
        calls, self._calls = self._calls, []
        for call in calls:
            block = call.block()
            changed = "" if block is None else rewritten_name(call.read, read_by(block, call.inputs))
            if changed and call.name not in self.found:
                self.found[call.name] = f"{changed} is another one, or has changed, when backward begins"
                self.changed.add(call.name)

    def _note(self, reason: str) -> None:
        if reason:
            self.found.setdefault(self._block, reason)

    def before(self, func: Any, args: Any, kwargs: Any) -> frozenset[int]:
        """An operation is about to run. Returns ids of storages that its results may share without having made them."""
        if not self._block or self._block in self.found:
            return frozenset()
        leaves = tree_leaves((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and leaf is not _default_generator(leaf.device):
                self._note("its forward draws from a generator of its own")
        if func._schema.is_mutable:
            self._look_at_writes(func._schema, args, kwargs)
        # lift_fresh takes over memory that was made for it outside of all operations.
        return frozenset() if func is torch.ops.aten.lift_fresh.default else frozenset(_storages(leaves))

    def _look_at_writes(self, schema: Any, args: Any, kwargs: Any) -> None:
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[index] if index < len(args) else kwargs.get(argument.name)
                # On another device: a copy that is being moved. What else there is, is compared before and after.
                here = [one for one in tree_leaves(written) if getattr(one, "device", None) == self._device]
                if not self._own.issuperset(_storages(here)):
                    self._writes = f"its forward writes into a tensor that it has not made ({schema.name})"

    def made(self, key: int) -> None:
        """The operation that ran has made a storage whose Python object has the id ``key``."""
        if self._block:
            self._own.add(key)

    def died(self, key: int) -> None:
        """That storage is gone."""
        self._own.discard(key)


def _default_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    return generators[device.index or 0] if generators else None


def _storages(leaves: Iterable[Any]) -> Iterator[int]:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and has_storage(leaf):
            yield id(leaf.untyped_storage())
