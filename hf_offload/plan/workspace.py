"""Memory that an operation takes for itself while it runs."""

from collections.abc import Sequence
from typing import Any

import torch

# Convolutions: where their input and their number of groups are among the arguments.
_CONVOLUTIONS = {torch.ops.aten.convolution.default: (0, 8), torch.ops.aten.convolution_backward.default: (1, 9)}
# They take their operands as they lie.
_STRIDED = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "clone", "copy", "_to_copy", "cat", "stack")
)


def workspace_bytes(func: Any, args: Any, results: Sequence[torch.Tensor]) -> int:
    """Bytes that a CPU kernel takes for itself while it runs, which no dispatch mode sees: an estimate, rather too large.

    oneDNN's convolutions copy operands and results into a layout of their own, unless channels come last. Most kernels that
    are neither element by element nor matrix products copy operands that are not contiguous.
    """
    if func in _CONVOLUTIONS:
        where, groups = _CONVOLUTIONS[func]
        given = args[where]
        if args[groups] > 1 or (given.dim() == 4 and given.is_contiguous(memory_format=torch.channels_last)):
            return 0
        return sum(leaf.nbytes for leaf in (*args, *results) if isinstance(leaf, torch.Tensor) and leaf.dim() > 2)
    name = func._schema.name.removeprefix("aten::")
    if name in _STRIDED or (torch.Tag.pointwise in func.tags and "gelu" not in name):
        return 0
    operands = (leaf for leaf in args if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return sum(tensor.nbytes for tensor in operands if tensor.dim() > 1 and not tensor.is_contiguous())
