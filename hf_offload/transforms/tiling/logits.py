"""Logits that are computed when they are read.

What a model usually does with them in training (casting, reshaping, dropping the last token, scaling, soft caps) is
recorded; cross-entropy of them is computed piece by piece; everything else gets the true logits.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_offload.interrupts import signals_deferred
from hf_offload.transforms.tiling.loss import HeadProjection, tiled_cross_entropy


class TiledLogits(Tensor):
    """Logits ``[..., vocabulary]`` of hidden states ``[..., hidden]``, computed when they are read.

    Any operation that is not known to work token by token is done on the true logits, with their graph.
    """

    _hidden: Tensor
    _projection: HeadProjection
    _true: Tensor | None

    @staticmethod
    def __new__(cls: type["TiledLogits"], hidden: Tensor, projection: HeadProjection) -> "TiledLogits":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (*hidden.shape[:-1], projection.vocabulary),
            dtype=projection.dtype,
            device=hidden.device,
            requires_grad=torch.is_grad_enabled(),
        )
        made._hidden, made._projection, made._true = hidden, projection, None
        if made.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_lost)
        return made

    def __init__(self, hidden: Tensor, projection: HeadProjection):
        pass

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], TiledLogits):
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        changes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if isinstance(kwargs.get("out"), TiledLogits) or (changes and args and isinstance(args[0], TiledLogits)):
            raise RuntimeError(
                f"{name}() changes logits in place, and with a tiled loss they do not exist. Change a copy "
                "(logits.clone()), or train with tiled_loss='off'."
            )
        args, kwargs = tree_map_only(TiledLogits, true_logits, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} reads logits below autograd, and with a tiled loss they do not exist. Pass it computed ones "
            "(logits.clone()), or train with tiled_loss='off'."
        )


def _lost(gradient: Tensor) -> None:
    # A function of its own (torch.autograd.Function) has read the logits inside, where there is no graph; DDP has one such.
    raise RuntimeError(
        "A gradient arrived at logits that do not exist with a tiled loss: it would never reach the model. Pass computed "
        "logits (logits.clone()) to whatever computes the loss, or train with tiled_loss='off'. "
        "If it is DDP that looks for unused parameters: set ddp_find_unused_parameters=False."
    )


def true_logits(logits: TiledLogits) -> Tensor:
    """The logits themselves. With gradients on they are computed once, and have their graph."""
    if logits._true is not None:
        return logits._true
    found = logits._projection.logits(logits._hidden)
    if torch.is_grad_enabled():
        logits._true = found
    return found


_IN_PLACE = frozenset({"__setitem__"} | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "mod")})


# -- what is remembered ------------------------------------------------------------------------------------------------


def _with_hidden(logits: TiledLogits, hidden: Tensor) -> TiledLogits:
    return TiledLogits(hidden, logits._projection)


def _then(
    logits: TiledLogits, function: Callable[[Tensor], Tensor], dtype: torch.dtype, *, cast: bool = False
) -> TiledLogits:
    return TiledLogits(logits._hidden, logits._projection.then(function, dtype, cast=cast))


def _cast(func: Any, logits: TiledLogits, *args: Any, **kwargs: Any) -> Any:
    dtype = _CASTS.get(func)
    if dtype is None:
        if func is Tensor.type_as:
            args = (args[0].dtype,)
        known = [value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)]
        devices = [value for value in (*args, kwargs.get("device")) if isinstance(value, (str, torch.device))]
        if len(known) > 1 or any(torch.device(device) != logits.device for device in devices) or kwargs.get("copy"):
            return NotImplemented
        if not all(isinstance(value, (torch.dtype, str, torch.device, bool)) for value in args):
            return NotImplemented
        dtype = known[0] if known else logits.dtype
    if dtype == logits.dtype:
        return logits
    if not dtype.is_floating_point:
        return NotImplemented
    return _then(logits, functools.partial(Tensor.to, dtype=dtype), dtype, cast=True)


def _same(func: Any, logits: TiledLogits, *args: Any, **kwargs: Any) -> Any:
    return logits if not args and not kwargs else NotImplemented


def _reshaped(func: Any, logits: TiledLogits, *shape: Any, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = shape[0]
    if not isinstance(shape, (tuple, list, torch.Size)) or not all(isinstance(size, int) for size in shape):
        return NotImplemented
    vocabulary, rows = logits._projection.vocabulary, logits._hidden.numel() // max(1, logits._hidden.shape[-1])
    *leading, last = shape
    if last == -1 and math.prod(leading) == rows:
        last = vocabulary
    if last != vocabulary:
        return NotImplemented
    return _with_hidden(logits, logits._hidden.reshape(*leading, logits._hidden.shape[-1]))


def _flattened(func: Any, logits: TiledLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    return _with_hidden(logits, logits._hidden.flatten(start_dim, end_dim))


def _indexed(func: Any, logits: TiledLogits, index: Any) -> Any:
    index = index if isinstance(index, tuple) else (index,)
    if not _leaves_vocabulary(logits, index):
        return NotImplemented
    return _with_hidden(logits, logits._hidden[index])


def _leaves_vocabulary(logits: TiledLogits, index: tuple[Any, ...]) -> bool:
    """Whether an index takes whole tokens: it does not reach the last dimension, or takes all of it."""
    used = 0
    for one in index:
        if one is None or one is Ellipsis:
            continue
        used += one.dim() if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) else 1
    if not any(one is Ellipsis for one in index) and used < logits.dim():
        return True
    return index[-1] == slice(None) if isinstance(index[-1], slice) else index[-1] is Ellipsis and used < logits.dim()


def _pieces(func: Any, logits: TiledLogits, *args: Any, **kwargs: Any) -> Any:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    kwargs["dim"] = dim % logits.dim()
    return tuple(_with_hidden(logits, hidden) for hidden in func(logits._hidden, *args[:1], **kwargs))


def _token_by_token(func: Any, logits: TiledLogits, *others: Any, **kwargs: Any) -> Any:
    """Arithmetic with a number, or with one value per entry of the vocabulary that needs no gradient."""
    if kwargs or any(not _alike_for_tokens(other, logits) for other in others):
        return NotImplemented
    tiny = torch.zeros(1, dtype=logits.dtype, device=logits.device)
    dtype = func(tiny, *(other.flatten()[:1] if isinstance(other, Tensor) else other for other in others)).dtype

    def function(tile: Tensor) -> Tensor:
        # One value per entry may have come with leading dimensions; pieces have one.
        fitting = (other.flatten() if isinstance(other, Tensor) and other.dim() else other for other in others)
        return func(tile, *fitting)  # type: ignore[no-any-return]

    return _then(logits, function, dtype)


def _alike_for_tokens(other: Any, logits: TiledLogits) -> bool:
    if isinstance(other, (int, float)):
        return True
    if not isinstance(other, Tensor) or isinstance(other, TiledLogits) or other.requires_grad:
        return False
    return other.numel() == 1 or (other.shape[-1:] == logits.shape[-1:] and other.numel() == other.shape[-1])


def _set_columns(func: Any, logits: TiledLogits, index: Any, value: Any) -> Any:
    """``logits[..., columns] = number``: entries of the vocabulary that a model rules out."""
    index = index if isinstance(index, tuple) else (index,)
    whole = all(one is Ellipsis or (isinstance(one, slice) and one == slice(None)) for one in index[:-1])
    reaches = any(one is Ellipsis for one in index[:-1]) or len(index) == logits.dim()
    plain = isinstance(value, (int, float)) or (
        isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
    )
    if not (whole and reaches and plain) or logits._true is not None:
        return NotImplemented
    columns = index[-1]

    def function(tile: Tensor) -> Tensor:
        tile = tile.clone()
        tile[..., columns] = value
        return tile

    logits._projection = logits._projection.then(function, logits.dtype)
    return None


@signals_deferred
def _argmax(func: Any, logits: TiledLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    """Needs no gradient, so it never needs all logits at once."""
    if dim is None or dim % logits.dim() != logits.dim() - 1:
        return NotImplemented
    hidden = logits._hidden
    with torch.no_grad():
        rows = hidden.reshape(-1, hidden.shape[-1])
        pieces = rows.split(logits._projection.tile_rows(len(rows)))
        found = [logits._projection.logits(piece).argmax(-1) for piece in pieces]
    best = torch.cat(found).view(hidden.shape[:-1])
    return best.unsqueeze(-1) if keepdim else best


def _cross_entropy(
    func: Any,
    logits: TiledLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    served = (
        weight is None
        and size_average is None
        and reduce is None
        and reduction in ("mean", "sum", "none")
        and logits.dim() == 2
        and target.dim() == 1
        and len(target) == len(logits)
        and not target.is_floating_point()
        and logits._true is None
    )
    if not served:
        return NotImplemented
    return tiled_cross_entropy(
        logits._hidden,
        target,
        logits._projection,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


_CASTS: dict[Any, torch.dtype] = {
    Tensor.float: torch.float,
    Tensor.double: torch.double,
    Tensor.half: torch.half,
    Tensor.bfloat16: torch.bfloat16,
}

_ARITHMETIC: tuple[Any, ...] = (
    Tensor.mul, Tensor.div, Tensor.add, Tensor.sub, Tensor.neg, Tensor.tanh,
    torch.mul, torch.div, torch.add, torch.sub, torch.neg, torch.tanh, torch.nn.functional.tanh,
    Tensor.__mul__, Tensor.__truediv__, Tensor.__add__, Tensor.__sub__, Tensor.__neg__, Tensor.__rmul__, Tensor.__radd__,
)  # fmt: skip

_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((*_CASTS, Tensor.to, Tensor.type_as), _cast),
    Tensor.contiguous: _same,
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: _set_columns,
    **dict.fromkeys((Tensor.split, torch.split, Tensor.chunk, torch.chunk), _pieces),
    **dict.fromkeys(_ARITHMETIC, _token_by_token),
    Tensor.argmax: _argmax,
    torch.argmax: _argmax,
    torch.nn.functional.cross_entropy: _cross_entropy,
}

# What the wrapper itself knows.
_ATTRIBUTES: tuple[Any, ...] = (
    Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim, Tensor.layout, Tensor.requires_grad, Tensor.is_cuda,
    Tensor.is_cpu, Tensor.is_meta, Tensor.is_sparse, Tensor.is_quantized, Tensor.is_nested,
)  # fmt: skip
_FACTS = frozenset(
    (
        *(getattr(attribute, "__get__", attribute) for attribute in _ATTRIBUTES),
        Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.element_size,
        Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex, torch.numel,
    )
)  # fmt: skip
