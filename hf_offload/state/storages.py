"""Storages of tensors: their bytes, and the one place where their pointer is swapped."""

import math
import sys
import weakref
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_offload.state.contexts import hidden_from_modes
from hf_offload.tensors import has_bytes

_DIGEST_WORDS = 1 << 20
"""How many words of an accelerator's memory are looked at at a time: more would take its memory."""


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """That of a tensor, whatever its class does about it."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The bytes of a storage, where they are."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def swap_pointer(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Let ``storage``, and with it all tensors, views and aliases over it, have the memory of ``other``; its size stays."""
    with hidden_from_modes():
        storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def digest_of(storage: torch.UntypedStorage) -> bytes:
    """A digest of the memory: on an accelerator, of sums that it computes itself, of words multiplied by where they are."""
    content = bytes_of(storage)
    if content.device.type == "cpu":
        return xxhash.xxh3_128_digest(content.numpy().data)
    words = content[: content.numel() // 4 * 4].view(torch.int32)
    factors = _factors(min(words.numel(), _DIGEST_WORDS), content.device)
    sums = [content[4 * words.numel() :].to(torch.int64)]
    for chunk in words.split(_DIGEST_WORDS):
        # Low bits of a word count, too, in the products, which overflow: those of 1.0 are zeros.
        mixed = (chunk ^ (chunk >> 15)).mul_(factors[: chunk.numel()])
        width = max(1, math.isqrt(mixed.numel()))
        square = mixed[: mixed.numel() // width * width].view(-1, width)
        sums += [
            square.sum(0, dtype=torch.int64),
            square.sum(1, dtype=torch.int64),
            mixed[square.numel() :].to(torch.int64),
        ]
    return xxhash.xxh3_128_digest(torch.cat(sums).cpu().numpy().data)


def _factors(count: int, device: torch.device) -> Tensor:
    """Odd numbers that look random, one for each place."""
    numbers = torch.arange(count, dtype=torch.int32, device=device).mul_(0x2545F491)
    return (numbers ^ (numbers >> 15)).mul_(0x1B873593).bitwise_or_(1)


def moves(tensor: Tensor) -> bool:
    """Whether a tensor of this kind can leave memory: one whose bytes are there (:func:`~hf_offload.tensors.has_bytes`), and
    whose changes a version counts.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return has_bytes(tensor) and not (tensor.is_meta or tensor.is_inference() or isinstance(tensor, FakeTensor))


_OF_ONE_TENSOR = 2
"""Uses of a storage that one tensor has: its own, and that of Python's object for the storage."""


class Holder:
    """By which all graphs hold a storage: that is one reference to it, however many they are."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = storage


class Uses:
    """Uses of one storage.

    Args:
        storage: It.
        on_host: Its device is the CPU.
        may_be_saved: Graphs, transforms or scripts may hold its tensors.
    """

    def __init__(self, storage: weakref.ref[torch.UntypedStorage], on_host: bool, may_be_saved: bool):
        self._storage = storage
        self._on_host = on_host
        self._may_be_saved = may_be_saved
        self._holder: weakref.ref[Holder] | None = None

    def have_others(self, tensors: Sequence[Tensor]) -> bool:
        """Whether anybody else than these ``tensors`` has the memory."""
        storage = self._storage()
        if storage is None:
            return False
        if has_others(storage, len(tensors)):
            return True
        if self._on_host:
            return False
        of_graphs = self._holder is not None and self._holder() is not None
        return _count_names(storage) > _NAMES + of_graphs or (self._may_be_saved and any(map(_is_saved, tensors)))

    def holder(self) -> Holder:
        """What a graph is to hold, rather than the storage."""
        found = None if self._holder is None else self._holder()
        if found is None:
            storage = self._storage()
            assert storage is not None
            found = Holder(storage)
            self._holder = weakref.ref(found)
        return found


def has_others(storage: torch.UntypedStorage, tensors: int) -> bool:
    """Whether anybody else than so many ``tensors`` holds the memory."""
    return _count(storage) > _OF_ONE_TENSOR - 1 + tensors


def _count(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def _is_saved(tensor: Tensor) -> bool:
    """Whether C++ holds a tensor: a graph that has saved it without hooks, a transform, a script."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor._use_count() == 1:  # type: ignore[attr-defined]
            return False
        if not tensor.requires_grad:
            return True
        with torch.enable_grad():
            edge = torch.autograd.graph.get_gradient_edge(tensor)  # which graphs hold, too, and which holds the tensor
        return edge is not None and tensor._use_count() > 2  # type: ignore[attr-defined]


def _count_names(storage: torch.UntypedStorage) -> int:
    """How many references to Python's object for the storage there are."""
    return sys.getrefcount(storage)


def _count_names_of_one() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return _count_names(storage)


_NAMES = _count_names_of_one()
"""References to a storage that one name refers to, as its caller counts them."""
