"""What programs do with weights between their steps: reads, and writes of every kind."""

import copy
import ctypes
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _own_part(weight: nn.Parameter, storage: torch.UntypedStorage) -> Any:
    begin = weight.storage_offset() * weight.element_size()
    return storage.tolist()[begin : begin + weight.nbytes]


def _at_address(weight: nn.Parameter) -> Any:
    if not weight.is_contiguous():
        return None
    return ctypes.string_at(weight.data_ptr(), weight.nbytes)


def _one_after_the_other(weight: nn.Parameter) -> Any:
    """With the memory of temporary views, whose address is asked for."""
    if weight.dim() < 2 or not weight.is_contiguous():
        return None
    address = weight.data[:1].data_ptr()
    return ctypes.string_at(address, weight[:1].nbytes)


def _exported(weight: nn.Parameter) -> Any:
    return torch.from_dlpack(weight.detach())


def _array(weight: nn.Parameter) -> Any:
    return np.asarray(weight.detach().double())


def _vmapped(weight: nn.Parameter) -> Any:
    return torch.vmap(lambda row: row.sum())(weight) if weight.dim() and weight.shape[0] else None


def _gradient_of(weight: nn.Parameter) -> Any:
    if not weight.is_floating_point():
        return None
    return torch.func.grad(lambda value: value.square().sum())(weight)


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "itself": lambda weight: weight,
    "sum": lambda weight: weight.sum(),
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "numpy": lambda weight: weight.detach().float().numpy().tolist(),
    "list": lambda weight: weight.tolist(),
    "rows": lambda weight: list(weight) if weight.dim() else None,
    "first": lambda weight: weight.flatten()[:1],
    "view": lambda weight: weight.unsqueeze(0).transpose(0, -1),
    "text": lambda weight: str(weight),
    "text of the value": lambda weight: f"{weight.data}",
    "copy": lambda weight: copy.deepcopy(weight),
    "pickle": lambda weight: pickle.loads(pickle.dumps(weight)),
    "file": _saved,
    "file of data": lambda weight: _saved(weight.data),
    "storage": lambda weight: _own_part(weight, weight.untyped_storage()),
    "typed storage": lambda weight: _own_part(weight, weight.storage().untyped()),
    "cloned storage": lambda weight: _own_part(weight, weight.untyped_storage().clone()),
    "address": _at_address,
    "address of a view": _one_after_the_other,
    "dlpack": _exported,
    "array": _array,
    "tensor of it": lambda weight: torch.tensor(weight),
    "as_tensor": lambda weight: torch.as_tensor(weight),
    "constructor": lambda weight: torch.Tensor(weight.float()) if weight.is_floating_point() else None,
    "own constructor": lambda weight: torch.Tensor(weight) if weight.dtype == torch.float32 else None,
    "like": lambda weight: torch.zeros_like(weight),
    "new": lambda weight: weight.new_tensor([1]),
    "equal": lambda weight: torch.equal(weight, weight),
    "stack": lambda weight: torch.stack([weight, weight]),
    "foreach": lambda weight: torch._foreach_mul([weight], 2),
    "sparse": lambda weight: weight.detach().float().to_sparse().to_dense() if not weight.is_complex() else None,
    "other dtype": lambda weight: weight.to(torch.float64),
    "bits": lambda weight: weight.detach().view(torch.uint8) if weight.dim() and weight.is_contiguous() else None,
    "shape": lambda weight: (weight.shape, weight.stride(), str(weight.dtype)),
    "flags": lambda weight: (weight.requires_grad, weight.is_leaf, weight.is_contiguous(), weight._version),
    "class": lambda weight: isinstance(weight, nn.Parameter),
    "parameter of it": lambda weight: nn.Parameter(weight, requires_grad=False),
    "parameter of data": lambda weight: nn.Parameter(weight.data, requires_grad=False),
    "vmap": _vmapped,
    "func.grad": _gradient_of,
    "narrow": lambda weight: torch.narrow(weight, 0, 0, 1) if weight.dim() and weight.shape[0] else None,
    "where": lambda weight: torch.where(weight.detach() == 0, 1, 0),
    "multiplied": lambda weight: np.float64(2) * weight.detach().double(),
    "contains": lambda weight: 0 in weight,
    "gradient": lambda weight: weight.grad,
    "bool": lambda weight: bool(weight) if weight.numel() == 1 else None,
    "int": lambda weight: int(weight) if weight.numel() == 1 else None,
}


def _storage_write(weight: nn.Parameter) -> None:
    weight.untyped_storage().fill_(0)


def _numpy_write(weight: nn.Parameter) -> None:
    if weight.dtype != torch.bfloat16:
        weight.detach().numpy()[...] *= 0 if weight.dtype == torch.int64 else 0.5


def _first(weight: nn.Parameter) -> None:
    if weight.numel():
        weight.data.flatten()[:1].mul_(2)  # of contiguous ones, it is a view


def _unnoticed(weight: nn.Parameter) -> None:
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(2)


def _in_inference(weight: nn.Parameter) -> None:
    with torch.inference_mode():
        weight.mul_(2)


def _at_address_write(weight: nn.Parameter) -> None:
    if weight.dim() and weight.is_contiguous():
        ctypes.memset(weight.data_ptr(), 0, min(2, weight.nbytes))


def _legacy_write(weight: nn.Parameter) -> None:
    if weight.dtype == torch.float32:
        torch.Tensor(weight).detach().mul_(2)


def _copied(weight: nn.Parameter) -> None:
    weight.copy_(weight.detach().flip(0) if weight.dim() else weight.detach() * 2)


def _set(weight: nn.Parameter) -> None:
    weight.set_(weight.detach().clone())


def _vector(weight: nn.Parameter) -> None:
    if weight.is_floating_point():
        vector = nn.utils.parameters_to_vector([weight]).detach() * 2
        nn.utils.vector_to_parameters(vector, [weight])


def _held_by_two(weight: nn.Parameter) -> None:
    one = weight.detach()
    other = one.view(-1) if one.is_contiguous() else one
    del one
    other.mul_(2)


def _exported_write(weight: nn.Parameter) -> None:
    torch.from_dlpack(weight.detach()).mul_(2)


def _other_memory(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone() * 2


def _resized(weight: nn.Parameter) -> None:
    weight.data = weight.data.t().contiguous().t() if weight.dim() == 2 else weight.data.clone()


def _larger_memory(weight: nn.Parameter) -> None:
    weight.data = torch.stack([weight.data, weight.data])[1]


WRITES: dict[str, Callable[[nn.Parameter], None]] = {
    "mul_": lambda weight: weight.mul_(2),
    "data.mul_": lambda weight: weight.data.mul_(2),
    "detach().mul_": lambda weight: weight.detach().mul_(2),
    "data.zero_": lambda weight: weight.data.zero_(),
    "copy_": _copied,
    "data.copy_": lambda weight: weight.data.copy_(weight.detach() * 2),
    "numpy": _numpy_write,
    "storage": _storage_write,
    "first": _first,
    "row": lambda weight: weight[0].mul_(2) if weight.dim() and weight.shape[0] else None,
    "item": lambda weight: weight.__setitem__(0, 1) if weight.dim() and weight.shape[0] else None,
    "view": lambda weight: weight.transpose(0, -1).mul_(2) if weight.dim() else None,
    "out": lambda weight: torch.mul(weight, 2, out=weight),
    "foreach": lambda weight: torch._foreach_mul_([weight], 2),
    "init": lambda weight: nn.init.constant_(weight, 1),
    "unnoticed": _unnoticed,
    "in inference": _in_inference,
    "address": _at_address_write,
    "constructor": _legacy_write,
    "set_": _set,
    "vector": _vector,
    "held by two": _held_by_two,
    "dlpack": _exported_write,
    "other memory": _other_memory,
    "other strides": _resized,
    "part of other memory": _larger_memory,
    "shared": lambda weight: weight.share_memory_(),
    "as_tensor": lambda weight: torch.as_tensor(weight).detach().mul_(2),
    "asarray": lambda weight: torch.asarray(weight).detach().mul_(2),
    "masked": lambda weight: weight.masked_fill_(weight.detach() == 0, 1),
    "index": lambda weight: weight.index_fill_(0, torch.tensor([0]), 1) if weight.dim() and weight.shape[0] else None,
}

HOLDS: dict[str, Callable[[nn.Parameter], Any]] = {
    "view": lambda weight: weight.detach()[..., :1],
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "storage": lambda weight: weight.untyped_storage(),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()) if weight.dtype != torch.bfloat16 else None,
    "view with a graph": lambda weight: weight.view_as(weight),
    "transposed": lambda weight: weight.transpose(0, -1) if weight.dim() else None,
    "constructor": lambda weight: torch.Tensor(weight) if weight.dtype == torch.float32 else None,
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "parameter": lambda weight: nn.Parameter(weight.data, requires_grad=False),
    "itself": lambda weight: weight,
    "memory": lambda weight: memoryview(weight.detach().numpy()) if weight.dtype != torch.bfloat16 else None,
}


def look(held: Any, rng: random.Random) -> Any:
    """What something that was held contains, after a write through it perhaps."""
    if isinstance(held, torch.UntypedStorage):
        found = held.tolist()
        if rng.random() < 0.5:
            held.fill_(0)
        return found
    if isinstance(held, memoryview):
        return held.tobytes()
    found = held.detach().clone()
    if rng.random() < 0.5:
        with torch.no_grad():
            held.detach().mul_(2)
    return found


def as_values(value: Any) -> Any:
    """A value of a log, without a graph and with the strides that others would see."""
    if isinstance(value, Tensor):
        return [str(value.dtype), value.stride(), value.detach().resolve_conj().resolve_neg().clone()]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_values(each) for key, each in value.items()}
    return [as_values(each) for each in value] if isinstance(value, list | tuple) else value
