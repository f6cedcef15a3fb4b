"""Who shares the memory of a tensor, and one without any."""

import torch
from torch import Tensor


def storage_holders(tensor: Tensor) -> int:
    """How many tensors, and objects such as NumPy's arrays, share the memory of ``tensor``, which counts, too."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # but for ``storage``


def hull_of(tensor: Tensor) -> Tensor:
    """A tensor like this one without any bytes."""
    hull = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    hull.untyped_storage().resize_(0)
    torch._C._set_throw_on_mutable_data_ptr(hull)  # an error, where PyTorch looks, instead of a crash
    return hull
