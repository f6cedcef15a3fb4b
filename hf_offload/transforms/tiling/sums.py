"""Sums of many products, more precise than the tensor that holds them."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_HALF = (torch.float16, torch.bfloat16)
# Products are added to a sum of another dtype by so many bytes, or by such a part of it: a GPU wants few large ones.
_BLOCK_BYTES, _BLOCK_PARTS = 4 << 20, 32


class WideSum:
    """A sum of many parts, in the memory of one that may be too coarse for it.

    In 16 bits it is kept in 24 while it grows: the upper 16 and the next 8 bits of a 32-bit number, in two tensors. The first
    of them becomes the result. ``is_used`` says whether there was any part.
    """

    def __init__(self, like: Tensor):
        self.is_used = False
        self._dtype = like.dtype
        self._is_planned = isinstance(like, FakeTensor)
        kind = torch.int16 if like.dtype in _HALF and not self._is_planned else like.dtype
        self._sum = torch.zeros_like(like, dtype=kind, memory_format=torch.contiguous_format, requires_grad=False)
        self._next = torch.zeros_like(self._sum, dtype=torch.uint8) if like.dtype in _HALF else None

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left.T @ right``."""
        self.is_used = True
        if self._is_planned:  # the same arithmetic and memory, in fewer operations
            self._sum.addmm_(left.t().to(self._dtype), right.to(self._dtype))
        elif self._next is None and left.dtype == right.dtype == self._dtype:
            self._sum.addmm_(left.t(), right)
        else:
            for block in _blocks(self._sum):
                self._write(block, product(left[:, block].t(), right, self._read(block)))

    def add(self, value: Tensor) -> None:
        """Add a tensor of the same shape."""
        self.is_used = True
        for block in _blocks(self._sum):
            self._write(block, self._read(block).add_(value[block]))

    def scaled(self, factor: Tensor, *, in_place: bool) -> Tensor:
        """The sum times ``factor``; ``in_place`` it takes no memory, and the sum is gone."""
        if self._next is None:
            return self._sum.mul_(factor) if in_place else self._sum * factor
        result = self._sum.view(self._dtype) if in_place else torch.empty_like(self._sum, dtype=self._dtype)
        for block in _blocks(self._sum):
            result[block] = self._read(block).mul_(factor)
        self._next = None if in_place else self._next
        return result

    def _read(self, block: slice) -> Tensor:
        if self._next is None or self._is_planned:
            return self._sum[block].to(wide_dtype(self._sum))
        wide = torch.zeros(self._sum[block].shape, dtype=torch.float, device=self._sum.device)
        _pieces(wide, torch.int16)[..., 1] = self._sum[block]
        _pieces(wide, torch.uint8)[..., 1] = self._next[block]
        return wide

    def _write(self, block: slice, wide: Tensor) -> None:
        if self._next is None or self._is_planned:
            self._sum[block] = wide
            return
        # Rounds to the 24 bits that are taken. NaN gets other bits first: CUDA's has all of them set, and would become -0.
        wide.nan_to_num_(math.nan, math.inf, -math.inf).view(torch.int32).add_(0x80)
        self._sum[block] = _pieces(wide, torch.int16)[..., 1]
        self._next[block] = _pieces(wide, torch.uint8)[..., 1]


def _pieces(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of 32-bit numbers as ``[..., pieces]``, the lowest bits first: everything torch runs on is little-endian."""
    return wide.view(dtype).unflatten(-1, (-1, wide.itemsize // dtype.itemsize))


def widened(tensor: Tensor) -> Tensor:
    """In 32 bits, or in as many as it has."""
    return tensor.to(wide_dtype(tensor))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """32 bits, or the tensor's own dtype where that has more."""
    return torch.promote_types(tensor.dtype, torch.float)


def product(left: Tensor, right: Tensor, onto: Tensor | None = None) -> Tensor:
    """``left @ right``, not rounded to 16 bits, added to ``onto`` if there is one; ``right`` is not copied as a whole."""
    if left.dtype == right.dtype and left.dtype not in _HALF:
        return left @ right if onto is None else onto.addmm_(left, right)
    if left.is_cuda:
        product = torch.mm(left, right, out_dtype=torch.float)
        return product if onto is None else onto.add_(product)
    if isinstance(left, FakeTensor):
        return widened(left.to(right.dtype) @ right)
    result = left.new_zeros(len(left), right.shape[1], dtype=wide_dtype(left)) if onto is None else onto
    for block in _blocks(right):
        result.addmm_(widened(left[:, block]), widened(right[block]))
    return result


def _blocks(matrix: Tensor) -> Iterator[slice]:
    """Slices of its rows that are small in 32 bits."""
    rows = max(1, len(matrix))
    step = max(1, rows // _BLOCK_PARTS, _BLOCK_BYTES // (4 * max(1, matrix.numel() // rows)))
    for begin in range(0, rows, step):
        yield slice(begin, begin + step)
