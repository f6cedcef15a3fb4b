"""Which norms can be recomputed: found by trying, since the name of a class guarantees nothing."""

import contextlib
import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

_NAME = re.compile(r"(RMS|Rms|Layer)_?Norm$|^(RMS|Rms|Layer)_?Norm")
_TORCHS = (nn.LayerNorm, nn.RMSNorm)
_WIDTH = 16  # of what goes into a norm that names none


def looks_like_norm(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's norms, or has the name and the parameters of one.

    The families of transformers are copies of one another in classes of their own; all scale vectors of one length.
    """
    if type(module) in _TORCHS:
        return True
    plain = not list(module.children()) and not list(module.buffers())
    vectors = all(one.dim() == 1 for one in module.parameters())
    return plain and vectors and _NAME.search(type(module).__name__) is not None


def why_not_again(module: nn.Module) -> str | None:
    """Why ``module``, which :func:`looks_like_norm`, cannot be computed a second time in backward; None if it can.

    A copy of it is tried, in training mode and on a CPU, with numbers of its own; the module itself is left as it is.
    """
    if type(module) in _TORCHS:
        return None
    with unset_fake_temporarily(), torch.device("cpu"), torch.random.fork_rng(devices=()), torch.enable_grad():
        try:
            return _try(module)
        except Exception as error:  # whatever a user's class raises, it is left alone
            return f"with hidden states alone it raises {type(error).__name__}"


def _try(module: nn.Module) -> str | None:
    # In the place of its parameters, which may be shards, or have no data: others of the same size.
    parameters = {id(one): nn.Parameter(_numbers(_shape(one), one.dtype)) for one in module.parameters()}
    tried = copy.copy(module)  # without its hooks, which a call of forward() passes by
    vars(tried).update(copy.deepcopy(_own(module), dict(parameters)))
    tried.train()
    first = next(iter(parameters.values()), None)
    width = getattr(module, "normalized_shape", (_WIDTH,)) if first is None else first.shape
    dtype = torch.float if first is None else first.dtype
    # Some take channels before places, of sequences or of images.
    shapes = [(2, 3, *width), (2, *width, 3), (2, *width, 3, 3)]
    for shape in shapes[:-1]:
        with contextlib.suppress(RuntimeError):
            return _try_twice(tried, _numbers(shape, dtype))
    return _try_twice(tried, _numbers(shapes[-1], dtype))


def _try_twice(tried: nn.Module, inputs: Tensor) -> str | None:
    draws, before = torch.get_rng_state(), _frozen(inputs)
    results = [tried.forward(inputs) for _ in range(2)]
    if not torch.equal(torch.get_rng_state(), draws):
        return "it draws random numbers"
    if _frozen(inputs) != before:
        return "it changes its input"
    if not all(isinstance(one, Tensor) and one.shape == inputs.shape for one in results):
        return "it does not give hidden states of the same shape"
    if _frozen(results[0]) != _frozen(results[1]):
        return "it gives other results the second time"
    return None


def _shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO leaves no elements where a parameter was


def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    return (0.5 + 0.37 * torch.arange(count, device="cpu")).sin().view(shape).to(dtype)


def _own(module: nn.Module) -> dict[str, Any]:
    """What a class has added to an ordinary module, and its parameters and buffers."""
    usual = vars(nn.Module()).keys() - {"_parameters", "_buffers"}
    return {name: value for name, value in vars(module).items() if name not in usual}


def _frozen(tensor: Tensor) -> tuple[int, bytes]:
    """Something to compare later, with its bytes."""
    plain = tensor.detach().contiguous().view(-1)
    return tensor._version, plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
