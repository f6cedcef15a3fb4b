"""The memory mode qlora."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from hf_offload.errors import OffloadConfigError
from hf_offload.methods.lora.lora import Lora
from hf_offload.methods.protocol import load_library
from hf_offload.settings.classes import settings
from hf_offload.settings.values import Flag, one_of
from hf_offload.structure.linears import chosen_linears

# Of bitsandbytes' 4 bits: weights that share a scale, scales that share one, and how many numbers 4 bits can name.
_BLOCK, _BLOCK_OF_SCALES, _CODES = 64, 256, 16
_SINGLE_BYTES = 4


@settings(frozen=True, kw_only=True)
class Qlora(Lora):
    """QLoRA (Dettmers et al., NeurIPS 2023, arXiv 2305.14314): LoRA on frozen weights in 4 bits.

    A model that was loaded in 4 bits is taken as it is; of another, the linear layers of the blocks are quantised here.

    Args:
        quant_type: ``"nf4"`` or ``"fp4"``.
        double_quant: Whether the scales of the blocks of 64 weights are quantised, too.
    """

    name: ClassVar[str] = "qlora"

    quant_type: Annotated[str, one_of(("nf4", "fp4"))] = "nf4"
    double_quant: Flag = True

    def _prepare_base(self, model: nn.Module, chosen: dict[str, Any]) -> None:
        if getattr(model, "is_loaded_in_4bit", False):
            return
        bitsandbytes = load_library("bitsandbytes", self.name, "'hf-offload[low-bit]'")
        _check_layers(chosen)
        for name, module in chosen.items():
            weight = module.weight
            layer = bitsandbytes.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                compute_dtype=weight.dtype,
                compress_statistics=self.double_quant,
                quant_type=self.quant_type,
                device="meta",
            )
            layer.weight = bitsandbytes.nn.Params4bit(
                weight.data,
                requires_grad=False,
                quant_type=self.quant_type,
                compress_statistics=self.double_quant,
            )
            layer.bias = module.bias
            model.set_submodule(name, layer.to(weight.device))  # this is what quantises
        model.is_loaded_in_4bit = True  # type: ignore[assignment]  # which is how transformers tells peft

    def prepare_fake(self, model: nn.Module) -> nn.Module:
        """Layers that compute as those of bitsandbytes do stand in for them, which quantise where they are made."""
        chosen = chosen_linears(model, self.targets)
        _check_layers(chosen)
        plain = Lora(rank=self.rank, alpha=self.alpha, dropout=self.dropout, targets=self.targets)
        adapted = plain.prepare_fake(model)
        layers: set[Any] = set(chosen.values())
        for module in list(adapted.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and child in layers:
                    setattr(module, name, _FourBitLinear(child, self.weight_bytes(child.weight.numel())))
        return adapted

    def weight_bytes(self, elements: int) -> int:
        """What bitsandbytes holds of a quantised weight with so many elements.

        Codes of 4 bits, a float32 scale for each 64, and the 16 numbers that codes stand for. With double quantisation a
        scale has 8 bits, and there is a float32 number for each 256 of them and one for all: 4.13 bits a weight, not 4.5.
        """
        scales = -(-elements // _BLOCK)
        codes = -(-elements // 2) + _CODES * _SINGLE_BYTES
        if not self.double_quant:
            return codes + _SINGLE_BYTES * scales
        return codes + scales + _SINGLE_BYTES * (-(-scales // _BLOCK_OF_SCALES) + 1)


def _check_layers(chosen: Mapping[str, Any]) -> None:
    """Refuse a layer that has no form in 4 bits."""
    for name, module in chosen.items():
        if not isinstance(module, nn.Linear):
            raise OffloadConfigError(
                f"memory_mode='qlora': {name} is a {type(module).__name__}, which bitsandbytes cannot quantise: use "
                "memory_mode='lora'."
            )


class _FourBitLinear(nn.Module):
    """Stands in for a linear layer of bitsandbytes whose frozen weight has ``nbytes``: nothing of the input is saved, and
    forward and backward dequantise the whole weight for as long as they need it.
    """

    def __init__(self, layer: nn.Linear, nbytes: int):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        packed: Any = nn.Parameter(torch.empty(nbytes, dtype=torch.uint8), requires_grad=False)
        packed.quant_state = SimpleNamespace(shape=layer.weight.shape)  # as bitsandbytes says what is packed
        self.weight = packed
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        shape = (self.out_features, self.in_features)
        result: Tensor = _FourBitProduct.apply(x, shape, self.bias)  # type: ignore[no-untyped-call]
        return result.clone()  # as peft does with layers in 4 bits


class _FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        ctx.shape = shape
        return nn.functional.linear(x, x.new_empty(shape), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient @ gradient.new_empty(ctx.shape), None, None
