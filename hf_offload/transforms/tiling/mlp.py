"""Position-wise modules, a few tokens at a time: what lies between their layers never exists for all tokens.

Every piece is recomputed in backward, so only its input is saved (Bekman et al. 2025, ALST, arXiv 2506.13996; the idea is
Reformer's, Kitaev et al. 2020).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_offload.checkpointing import checkpoint
from hf_offload.errors import OffloadConfigError
from hf_offload.settings.shown import nearest
from hf_offload.structure.linears import is_named
from hf_offload.structure.units import find_units
from hf_offload.surgery import ReplacedForward

_TRIAL_TOKENS = 4
# Operations that treat the last dimension of every token alike, or only change its layout.
_TOKEN_BY_TOKEN = frozenset(
    (
        "_to_copy", "_unsafe_view", "add", "addmm", "alias", "chunk", "clamp", "clone", "detach", "div", "exp", "gelu",
        "hardtanh", "leaky_relu", "linear", "mish", "mm", "mul", "native_dropout", "native_layer_norm", "neg", "pow", "relu",
        "sigmoid", "silu", "slice", "softplus", "split", "sub", "t", "tanh", "transpose", "view",
    )
)  # fmt: skip


class TiledModule(ReplacedForward):
    """A module whose forward runs over pieces of its tokens while training."""

    def __init__(self, name: str, module: nn.Module, tile_rows: Callable[[int, int], int]):
        super().__init__(name, module)
        self._tile_rows = tile_rows

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hidden states ``[..., hidden]`` of hidden states."""
        whole = args or kwargs or not self.module.training or not torch.is_grad_enabled()
        width = hidden.shape[-1]
        tokens = hidden.numel() // max(1, width)
        rows = self._tile_rows(tokens, width)
        if whole or rows >= tokens:
            return self.own_forward(hidden, *args, **kwargs)
        pieces = hidden.reshape(1, tokens, width).split(rows, dim=1)
        done = [checkpoint(self.own_forward, piece) for piece in pieces]
        return torch.cat(done, dim=1).reshape(*hidden.shape[:-1], -1)


def position_wise(model: nn.Module) -> dict[str, nn.Module]:
    """Modules inside of the model's blocks that give every token what its own hidden state makes of it, by name.

    Found by trying: a few tokens go in, one of them is changed, and only what comes out for it may change.
    """
    found = {}
    for name, unit in find_units(model).items():
        if unit.block is not None and unit.block != name and why_not(unit.module) is None:
            found[name] = unit.module
    return found


def chosen_modules(model: nn.Module, names: str | Sequence[str]) -> dict[str, nn.Module]:
    """Modules to cut: all position-wise ones (``"on"``), or those whose name is, or ends with, one of ``names``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` where there is none, or where one is not position-wise.
    """
    if names == "on":
        found = position_wise(model)
        if not found:
            raise OffloadConfigError(
                f"{type(model).__name__} has no module inside of its blocks that takes hidden states alone and treats every "
                "token by itself, so no MLP can be cut: name modules in tiled_mlp, or set it to 'off'."
            )
        return found
    chosen: dict[str, nn.Module] = {}
    for wanted in names:
        matching = {path: module for path, module in model.named_modules() if path and is_named(path, wanted)}
        if not matching:
            ends = {path.rpartition(".")[2] for path, _ in model.named_modules() if path}
            raise OffloadConfigError(
                f"tiled_mlp names {wanted!r}, but {type(model).__name__} has no module of that name.{nearest(wanted, ends)}"
            )
        chosen |= matching
    for path, module in chosen.items():
        reason = why_not(module)
        if reason is not None:
            raise OffloadConfigError(f"tiled_mlp names {path}, which cannot be cut by tokens: {reason}.")
    return chosen


def why_not(module: nn.Module) -> str | None:
    """Why a module cannot be cut by tokens, or None if it can."""
    for child in module.modules():
        first = next((one for one in child.parameters(recurse=False) if one.dim() > 1), None)
        if first is not None:
            # The matrix of other classes, such as GPT-2's Conv1D, is transposed.
            return _try(module, getattr(child, "in_features", first.shape[0]), first)
    return "it has no matrix"


@torch.no_grad()
def _try(module: nn.Module, width: int, like: Tensor) -> str | None:
    training = module.training
    # The same numbers in every run, and no draw from the run's own generator.
    rows = torch.linspace(-1, 1, _TRIAL_TOKENS * width, device="cpu").sin_().view(1, _TRIAL_TOKENS, width).to(like)
    changed = rows.clone()
    changed[:, 0] += 1
    module.eval()
    try:
        with _Operations() as seen:
            before = module(rows)
        after = module(changed)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        return f"with hidden states alone it raises {type(error).__name__}"
    finally:
        module.train(training)
    if not isinstance(before, Tensor) or before.shape != rows.shape:
        return "it does not give hidden states of the same shape"
    if isinstance(before, FakeTensor):  # nothing to compare: go by the operations
        others = seen.names - _TOKEN_BY_TOKEN
        return f"it has no data to try, and runs {', '.join(sorted(others))}" if others else None
    if not torch.allclose(before[:, 1:].float(), after[:, 1:].float(), rtol=1e-3, atol=1e-5):
        return "what it gives for one token depends on others"
    return None


class _Operations(TorchDispatchMode):
    """Notes the names of what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
