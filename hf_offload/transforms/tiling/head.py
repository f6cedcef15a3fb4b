"""An output head that returns logits to be computed later: the model's own loss then works on pieces of them."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_offload.checkpointing import in_recompute
from hf_offload.errors import OffloadConfigError
from hf_offload.interrupts import signals_deferred
from hf_offload.settings.sizes import format_bytes
from hf_offload.surgery import ReplacedForward
from hf_offload.transforms.backward import autocast_dtype
from hf_offload.transforms.tiling.cut import Cut
from hf_offload.transforms.tiling.logits import TiledLogits
from hf_offload.transforms.tiling.loss import HeadProjection


def find_head(model: nn.Module) -> tuple[str, nn.Module]:
    """Name and module of the model's output head.

    Raises :class:`~hf_offload.errors.OffloadConfigError` with the reason where there is none whose loss can be cut.
    """
    name = type(model).__name__
    asked = getattr(model, "get_output_embeddings", None)
    try:
        head = None if asked is None else asked()
    except (AttributeError, NotImplementedError):
        head = None
    # FSMT's is the embedding itself, which is called with tokens.
    if not isinstance(head, nn.Module) or isinstance(head, nn.Embedding):
        raise OffloadConfigError(
            f"{name} has no output head that get_output_embeddings() knows, so its loss cannot be cut: set tiled_loss='off'."
        )
    where = next((path for path, module in model.named_modules() if module is head), type(head).__name__)
    if _is_shard_of_its_own(head):
        raise OffloadConfigError(
            f"{where} of {name} is an FSDP or ZeRO-3 unit of its own: its weight is resharded before the loss is computed. "
            "Leave the head to the outermost fully_shard(), or set tiled_loss='off'."
        )
    loss = _own_loss(model)
    if loss is not None and not getattr(loss, "__module__", "").startswith("transformers."):
        raise OffloadConfigError(
            f"{name} has a loss function of its own ({getattr(loss, '__qualname__', type(loss).__name__)}), and what it does "
            "with the logits is unknown: set tiled_loss='off'."
        )
    return where, head


def head_name(model: nn.Module) -> tuple[str, bool]:
    """The name of the head whose loss can be cut, empty where there is none; and whether it is cut."""
    try:
        name, head = find_head(model)
    except Exception:  # whatever a model's own get_output_embeddings() trips over
        return "", False
    return name, isinstance(getattr(head.forward, "__self__", None), TiledHead)


class TiledHead(ReplacedForward):
    """The output head of a model. In training, with gradients, it returns
    :class:`~hf_offload.transforms.tiling.logits.TiledLogits`; otherwise it is unchanged.
    """

    def __init__(self, name: str, head: nn.Module, cut: Cut):
        super().__init__(name, head)
        self._cut = cut
        self._checked = False

    @torch._disable_dynamo  # compiled code cannot handle tensors without data
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Logits to come, of hidden states ``[..., hidden]``."""
        hidden = args[0] if args else None
        plain = len(args) == 1 and not kwargs and isinstance(hidden, Tensor) and hidden.dim() > 1
        if not plain or not self.module.training or not torch.is_grad_enabled() or in_recompute():
            return self.own_forward(*args, **kwargs)
        assert isinstance(hidden, Tensor)
        if not hidden.requires_grad and not any(one.requires_grad for one in self.module.parameters()):
            return self.own_forward(hidden)
        autocast = autocast_dtype(hidden.device)
        vocabulary, dtype = self._says(hidden, autocast)
        projection = HeadProjection(self.module, self.own_forward, vocabulary, dtype, autocast, self._cut)
        self._check_tile(projection, hidden.numel() // max(1, hidden.shape[-1]))
        return TiledLogits(hidden, projection)

    @signals_deferred
    def _says(self, hidden: Tensor, autocast: torch.dtype | None) -> tuple[int, torch.dtype]:
        """How many logits the head gives, and their dtype."""
        width = getattr(self.module, "out_features", None)
        if isinstance(width, int):
            return width, autocast or hidden.dtype
        with torch.no_grad():
            one = self.own_forward(hidden.detach()[..., :1, :].reshape(-1, hidden.shape[-1])[:1])
        return one.shape[-1], one.dtype

    def _check_tile(self, projection: HeadProjection, tokens: int) -> None:
        # Only the first batch: a last one may be short.
        if self._checked:
            return
        self._checked = True
        tile_bytes = self._cut.tile_bytes
        if tile_bytes is not None and projection.tile_rows(tokens) >= tokens:
            raise OffloadConfigError(
                f"tile_bytes={format_bytes(tile_bytes)} holds the logits of all {tokens} tokens of a batch "
                f"({format_bytes(4 * projection.vocabulary * tokens)}), so nothing would be cut: set less, or unset it."
            )


def _is_shard_of_its_own(head: nn.Module) -> bool:
    names = {base.__name__ for base in type(head).__mro__}
    if names & {"FSDPModule", "FullyShardedDataParallel"}:
        return True
    return any(hasattr(parameter, "ds_id") for parameter in head.parameters())


def _own_loss(model: nn.Module) -> Any:
    inner = getattr(model, "get_base_model", lambda: model)()
    return inner.__dict__.get("_loss_function")
