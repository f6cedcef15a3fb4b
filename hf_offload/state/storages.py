"""Storages of tensors: their bytes, and the one place where their pointer is swapped."""

import math

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
