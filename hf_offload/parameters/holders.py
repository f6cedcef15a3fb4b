"""Who shares the memory of a tensor."""

import torch
from torch import Tensor


def storage_holders(tensor: Tensor) -> int:
    """How many tensors, and objects such as NumPy's arrays, share the memory of ``tensor``, which counts, too."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # but for ``storage``
