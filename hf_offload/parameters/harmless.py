"""Functions of PyTorch that neither read nor write the values of a tensor."""

from collections.abc import Iterator
from typing import Any

import torch

_PROPERTIES = [
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "itemsize",
    "nbytes",
    "is_cpu",
    "is_cuda",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "is_mkldnn",
    "retains_grad",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
]
_METHODS = [
    "__hash__",
    "__len__",
    "size",
    "stride",
    "numel",
    "nelement",
    "dim",
    "ndimension",
    "element_size",
    "get_device",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "is_signed",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
]


def _harmless() -> Iterator[Any]:
    """Functions that neither read nor write values."""
    for name in _PROPERTIES:
        if hasattr(torch.Tensor, name):
            yield getattr(torch.Tensor, name).__get__
    yield vars(torch._C.TensorBase)["requires_grad"].__set__
    for name in _METHODS:
        yield getattr(torch.Tensor, name)
    yield from (torch.is_floating_point, torch.is_complex, torch.numel)


_HARMLESS = frozenset(_harmless())


def is_harmless(func: Any) -> bool:
    """Whether ``func`` neither reads nor writes values."""
    return func in _HARMLESS
