"""Who shares the memory of a tensor, and one without any."""

import functools
import sys

import torch
from torch import Tensor


def storage_holders(tensor: Tensor) -> int:
    """How many tensors, storages of Python, and objects such as NumPy's arrays share the memory of ``tensor``, which counts,
    too.
    """
    storage = tensor.untyped_storage()  # the only object of this storage, which others may have, too
    tensors = int(torch._C._storage_Use_Count(storage._cdata)) - 1
    return tensors + sys.getrefcount(storage) - _references_of_one_holder()


@functools.cache
def _references_of_one_holder() -> int:
    """How many references to a storage's object there are where nothing but one variable has it."""
    tensor = torch.ones(1, device="cpu")
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def hull_of(tensor: Tensor) -> Tensor:
    """A tensor like this one without any bytes."""
    hull = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    hull.untyped_storage().resize_(0)
    torch._C._set_throw_on_mutable_data_ptr(hull)  # an error, where PyTorch looks, instead of a crash
    return hull
