"""Modules that compute in another way when a parameter is of a subclass with a ``__torch_function__``: they see plain ones.

PyTorch's own attention has a fast path for inference, with other kernels and other bits, and takes it only with tensors of
the usual classes.
"""

from typing import Any

import torch
from torch import nn

from hf_offload.parameters.demand import as_plain, is_demanded
from hf_offload.surgery import ReplacedForward

_WITH_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class WithPlainParameters(ReplacedForward):
    """Completes the parameters, and makes them plain ones while the module computes without gradients: because they are
    disabled, or because nothing needs one.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.module.training or (torch.is_grad_enabled() and self._needs_gradients(args, kwargs)):
            return self.own_forward(*args, **kwargs)
        with as_plain([p for p in self.module.parameters() if is_demanded(p)]):
            return self.own_forward(*args, **kwargs)

    def _needs_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        return any(value.requires_grad for value in (*given, *self.module.parameters()))


def keep_fast_paths(model: nn.Module) -> None:
    """Let the modules of ``model`` that have a fast path take it as in a run in memory. Idempotent."""
    for name, module in model.named_modules():
        if isinstance(module, _WITH_FAST_PATHS) and not _is_kept(module):
            WithPlainParameters(name, module).install()  # for good: parameters stay demanded without a session, too


def _is_kept(module: nn.Module) -> bool:
    return isinstance(getattr(module.forward, "__self__", None), WithPlainParameters)
