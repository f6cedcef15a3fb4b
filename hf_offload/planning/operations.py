"""What a recorder has to know of single operations: memory that they take for themselves, and what dispatch modes hide."""

import functools
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

# Convolutions: where their input is among the arguments; the weight comes next, and the others at this distance from it.
_CONVOLUTIONS = {torch.ops.aten.convolution.default: 0, torch.ops.aten.convolution_backward.default: 1}
_STRIDE, _GROUPS = 3, 8
# oneDNN's LSTM layers: how many times as large as its largest operand of three dimensions what they take is. The gates are
# four times as wide as the output.
_LSTM = {torch.ops.aten.mkldnn_rnn_layer.default: 5, torch.ops.aten.mkldnn_rnn_layer_backward.default: 6}
# These copy operands that are not contiguous; most others take them as they lie.
_CONTIGUOUS = (
    "native_layer_norm", "native_batch_norm_backward", "native_group_norm", "_softmax", "_log_softmax", "gelu", "upsample",
    "roll",
)  # fmt: skip
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def workspace_bytes(func: Any, args: Any, results: Sequence[torch.Tensor]) -> int:
    """Bytes that a CPU kernel takes for itself while it runs, which no dispatch mode sees: an estimate, rather too large.

    oneDNN's convolutions copy operands and results into a layout of their own, unless channels come last. Norms,
    softmax and a few others copy operands that are not contiguous.
    """
    if func in _LSTM:
        operands = (leaf for leaf in (*args, *results) if isinstance(leaf, torch.Tensor) and leaf.dim() == 3)
        return _LSTM[func] * max((tensor.nbytes for tensor in operands), default=0)
    if func in _CONVOLUTIONS:
        where = _CONVOLUTIONS[func]
        given, weight = args[where], args[where + 1]
        if args[where + _GROUPS] > 1 or (given.dim() == 4 and given.is_contiguous(memory_format=torch.channels_last)):
            return 0
        if tuple(args[where + _STRIDE]) == tuple(weight.shape[2:]):  # patches: the input is read as it lies
            return results[0].nbytes if where == 0 else 2 * args[0].nbytes
        return sum(leaf.nbytes for leaf in (*args, *results) if isinstance(leaf, torch.Tensor) and leaf.dim() > 2)
    if not func._schema.name.removeprefix("aten::").startswith(_CONTIGUOUS):
        return 0
    operands = (leaf for leaf in args if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return sum(tensor.nbytes for tensor in operands if tensor.dim() > 1 and not tensor.is_contiguous())


def count_changes_of_lists(func: Any, args: Sequence[Any]) -> None:
    """Count versions for what ``func``, such as ``torch._foreach_mul_``, has done to lists of tensors in a dispatch mode.

    PyTorch counts them outside of such modes alone.
    """
    for place in _changed_lists(func):
        for tensor in args[place]:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


@functools.cache
def _changed_lists(func: Any) -> tuple[int, ...]:
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.name.startswith("aten::_foreach_"):
        return ()
    written = (argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)
    return tuple(place for place, is_written in enumerate(written) if is_written)


def in_python_of_backward() -> bool:
    """Whether an operation under a dispatch mode was called by a hook or function of Python's, and not by autograd itself."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    frame = frame and frame.f_back
    while frame is not None and frame.f_globals["__name__"].startswith(("torch._dynamo", "torch._compile")):
        frame = frame.f_back  # what keeps the mode itself from being compiled
    return frame is not None and frame.f_code is not _RUN_BACKWARD
