"""Tensors that have sizes but no data: models of any size are built on them, and computed with, in no memory."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from hf_offload.errors import OffloadPlanError

_MOST_KNOWN = 1 << 20


@contextlib.contextmanager
def any_data(as_on_cuda: bool) -> Iterator[None]:
    """Inside, a model on such tensors computes what it computes with data; ``as_on_cuda``, with CUDA's dropout."""
    with contextlib.ExitStack() as stack:
        if as_on_cuda:
            stack.enter_context(_DropoutAsOnCuda())
        for one in (_AnyData(), _rows_that_are_not_packed(), _known_values()):
            stack.enter_context(one)
        yield


def run_backward(loss: torch.Tensor) -> None:
    """``loss.backward()`` inside of :func:`any_data`, with its changes in force, so that a part of forward that is recomputed
    is what it was. Torch switches function modes off for ``Tensor.backward``, as for every function that they see.
    """
    ones = torch.ones_like(loss)
    torch.autograd.graph._engine_run_backward(
        (loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextlib.contextmanager
def _rows_that_are_not_packed() -> Iterator[None]:
    """Transformers looks whether several texts share a row, and takes what it cannot look into to be such a row. Its mask
    would make attention take another kernel than a real batch of whole rows does.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    found = getattr(masking_utils, name, None)
    if found is None:
        yield
        return
    setattr(masking_utils, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, found)


@contextlib.contextmanager
def _known_values() -> Iterator[None]:
    """Inside, what is computed from values that are known, is known: losses may look at their labels."""
    name = "CONSTANT_NUMEL_LIMIT"
    found = getattr(fake_tensor, name)
    setattr(fake_tensor, name, _MOST_KNOWN)
    try:
        yield
    finally:
        setattr(fake_tensor, name, found)


def with_values(model: nn.Module, real: torch.Tensor) -> torch.Tensor:
    """A tensor without data like ``real``, for ``model`` on tensors without data, whose values may be asked for nevertheless
    unless there are very many. Called outside of :func:`fake_mode`.
    """
    mode, converter = mode_of(model), mode_of(model).fake_tensor_converter
    return converter.from_real_tensor(mode, real, make_constant=real.numel() <= _MOST_KNOWN)


@contextlib.contextmanager
def fake_mode() -> Iterator[None]:
    """Inside, tensors have sizes but no data: models of any size are built in no time and no memory."""
    with FakeTensorMode() as mode, _KnownSchedules(mode), _known_values():
        yield


def mode_of(model: nn.Module) -> FakeTensorMode:
    """The mode that a model was built in. Raises :class:`~hf_offload.errors.OffloadPlanError` without one."""
    for tensor in model.parameters():
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    raise OffloadPlanError(f"{type(model).__name__} was not built on tensors without data: build it in fake_mode().")


class _DropoutAsOnCuda(TorchFunctionMode):
    """Lets dropout save what CUDA's kernels save, and attention take its fused kernel with dropout, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs = kwargs | {"dropout_p": 0.0}
        elif func is nn.functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input


class _KnownSchedules(TorchFunctionMode):
    """Lets constructors read numbers off a line: how often each layer of a model drops its path."""

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.linspace:
            return func(*args, **(kwargs or {}))
        with unset_fake_temporarily():
            real = func(*args, **((kwargs or {}) | {"device": "cpu"}))
        return self._mode.fake_tensor_converter.from_real_tensor(self._mode, real, make_constant=True)


class _AnyData(TorchFunctionMode):
    """Lets some operations be counted whatever their data are.

    However tokens are routed to experts, each goes to as many of them, and all that is computed for them has as many rows:
    memory does not depend on the routing. A coin that decides whether a layer is skipped does not skip it, which is what
    needs most.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GROUPED and len(args) == 2 and args[0].dim() == 2 and args[1].dim() == 3:
            with torch.autocast("cpu", enabled=False):
                return _GroupedProduct.apply(*args)  # type: ignore[no-untyped-call]
        if func is torch.rand and args in (([],), ((),)):
            return torch.tensor(0.5)
        if func is nn.functional.ctc_loss:
            return _ctc_loss(*args, **kwargs)
        return func(*args, **kwargs)


_GROUPED = tuple(
    found
    for found in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if found is not None
)


def _ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Targets of rows of the same length, one behind the other where they have one dimension."""
    length = targets.shape[-1] if targets.dim() > 1 else -(-targets.numel() // log_probs.shape[1])
    return _CtcLoss.apply(log_probs, length)  # type: ignore[no-untyped-call,no-any-return]


class _CtcLoss(torch.autograd.Function):
    """Keeps what torch's does: the likelihoods of every part of the targets, with blanks in between, at every time."""

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, length: int) -> torch.Tensor:
        times, rows, _ = log_probs.shape
        ctx.save_for_backward(log_probs, log_probs.new_empty(rows, times, 2 * length + 1))
        return log_probs.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        log_probs, likelihoods = ctx.saved_tensors
        torch.empty_like(likelihoods)  # the same from behind
        return torch.empty_like(log_probs), None


class _GroupedProduct(torch.autograd.Function):
    """Rows times the matrix of the group that each is in: of the cost of one product, whatever the groups are."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows @ matrices[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        rows, matrices = ctx.saved_tensors
        of_matrices = matrices.new_empty(matrices.shape)
        torch.mm(rows.t(), gradient, out=of_matrices[0])
        return gradient @ matrices[0].t(), of_matrices
