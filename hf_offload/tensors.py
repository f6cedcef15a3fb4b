"""What kind of tensor one is: of which class, whether it has memory of its own, and how many bytes."""

import math

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

_ORDINARY = (Tensor, nn.Parameter, FakeTensor)
_COMPRESSED = {
    torch.sparse_csr: ("values", "crow_indices", "col_indices"),
    torch.sparse_bsr: ("values", "crow_indices", "col_indices"),
    torch.sparse_csc: ("values", "ccol_indices", "row_indices"),
    torch.sparse_bsc: ("values", "ccol_indices", "row_indices"),
}


def is_wrapped(tensor: Tensor) -> bool:
    """Whether ``tensor`` is one of ``torch.func``'s (batched, dual, functional), whose bytes are another tensor's."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def are_transformed() -> bool:
    """Whether operations run inside of a transform of ``torch.func`` or of forward-mode differentiation, which may do more
    with a tensor than its bytes show.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def has_storage(tensor: Tensor) -> bool:
    """Whether ``untyped_storage()`` can be asked for: not of sparse and opaque tensors, ``torch.func``'s, and parameters that
    have no shape yet. That of a subclass may have no memory.
    """
    return torch._C._has_storage(tensor) and not is_lazy(tensor)


def can_be_followed(tensor: Tensor) -> bool:
    """Whether ``tensor`` has a version, which every change raises: not those of inference mode, nor what has no shape yet."""
    return not is_lazy(tensor) and not tensor.is_inference()


def is_ordinary(kind: type) -> bool:
    """Whether a class of tensors is PyTorch's own, without operations of its own. Those of a model that is only counted are
    fake.
    """
    return kind in _ORDINARY


def has_bytes(tensor: Tensor) -> bool:
    """Whether strides over the bytes of a storage describe ``tensor``, on whatever device and of whatever class: not wrapper
    subclasses, sparse, nested and quantised tensors, those of ``torch.func``, and those without a shape yet.
    """
    return (
        torch._C._has_storage(tensor)
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor._is_zerotensor()
        and not is_wrapped(tensor)
        and (type(tensor) is Tensor or not (is_lazy(tensor) or hasattr(tensor, "__tensor_flatten__")))
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a plain one: of no class but :class:`torch.Tensor`, and one that :func:`has_bytes`."""
    return type(tensor) is Tensor and has_bytes(tensor)


def byte_span(tensor: Tensor) -> tuple[int, int]:
    """First and one-past-last byte that a non-empty ``tensor`` touches in its storage. Strides are never negative."""
    itemsize = tensor.element_size()
    first = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return first * itemsize, (first + tensor.numel()) * itemsize
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return first * itemsize, (last + 1) * itemsize


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """What holds a tensor's elements: itself, of a sharded one this process's part, of a sparse one values and indices."""
    local = getattr(tensor, "_local_tensor", tensor)  # DTensor's to_local() is an operation that would be recorded
    if local.layout is torch.strided:
        return (local,)
    with _disable_current_modes():
        if local.layout is torch.sparse_coo:
            return local._values(), local._indices()
        return tuple(getattr(local, name)() for name in _COMPRESSED.get(local.layout, ())) or (local,)


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of one that is spread over processes, of this one's part."""
    return sum(0 if is_lazy(part) else part.numel() * part.element_size() for part in parts_of(tensor))


def parameter_count(model: nn.Module) -> int:
    """Parameters of ``model``. A weight that bitsandbytes packed into 4 bits counts with its shape before packing."""
    packed = ((one, getattr(getattr(one, "quant_state", None), "shape", None)) for one in model.parameters())
    return sum(one.numel() if shape is None else math.prod(shape) for one, shape in packed)
