"""Adapters on frozen weights: LoRA and its relatives, made by peft."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_offload.errors import OffloadConfigError
from hf_offload.optimizers.param_groups import decay_groups
from hf_offload.optimizers.projected.sizes import adamw_bytes
from hf_offload.settings.values import Reader, flag, names, number, one_of, read_fields, setting, whole
from hf_offload.structure.linears import chosen_linears

# Of bitsandbytes' 4 bits: weights that share a scale, scales that share one, and how many numbers 4 bits can name.
_BLOCK, _BLOCK_OF_SCALES, _CODES = 64, 256, 16
_SINGLE_BYTES = 4
_WITH_NEW_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")


def _dropout(name: str, value: Any) -> float:
    found: float = number(at_least=0, at_most=1)(name, value)
    if found == 1:
        raise OffloadConfigError(f"{name}={found!r} is no probability: give 0 or more, and below 1.")
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """LoRA (Hu et al., ICLR 2022, arXiv 2106.09685): a product of two small matrices beside each chosen linear layer.

    Args:
        rank: Of the product.
        alpha: The product is multiplied by ``alpha / rank``. Default: twice the rank.
        dropout: Of the adapters' inputs, 0 to below 1.
        targets: ``"auto"``: the linear layers of the repeated blocks, GPT-2's ``Conv1D`` included. ``"all"``: those outside
            of them too, but not the output head. Or ends of module names.
    """

    name: ClassVar[str] = "lora"
    takes_fused: ClassVar[bool] = True

    rank: int = setting(16, whole(1))
    alpha: float | None = setting(None, number(above=0))
    dropout: float = setting(0.0, Reader(_dropout))
    targets: str | Sequence[str] = setting("auto", names("ends of module names", alone=("auto", "all")))

    def __post_init__(self) -> None:
        with read_fields(self, f"settings of {self.name}"):
            pass

    def prepare(self, model: nn.Module, **options: Any) -> nn.Module:
        """``model`` with adapters, the only weights that are trained; ``options`` are for ``peft.get_peft_model``.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if targets match nothing, if a layer is smaller than the rank,
        or if there are adapters already.
        """
        peft = _peft(self.name)
        if isinstance(model, peft.PeftModel) or getattr(model, "_hf_peft_config_loaded", False):
            raise OffloadConfigError(
                f"memory_mode={self.name!r}: the model has adapters already: leave out memory_mode, or give the base model."
            )
        heads = _new_heads(model)
        chosen = {
            name: module
            for name, module in chosen_linears(model, self.targets).items()
            if name.partition(".")[0] not in heads
        }
        small = {name: least for name, module in chosen.items() if (least := min(_shape(module))) < self.rank}
        if small:
            name, least = next(iter(small.items()))
            raise OffloadConfigError(
                f"rank={self.rank} is above the smaller dimension of {name} ({least}) and {len(small) - 1} others: lower it, "
                "or name other targets."
            )
        names = _short_names(model, list(chosen))
        self._prepare_base(model, chosen)
        settings = peft.LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank if self.alpha is None else self.alpha,
            lora_dropout=self.dropout,
            target_modules=names,
            task_type=_task_type(model),
            modules_to_save=heads or None,
            **self._options(),
        )
        with warnings.catch_warnings():
            # GPT-2's transposed layers, which peft puts right itself, and names that transformers has given up since.
            warnings.simplefilter("ignore")
            adapted: nn.Module = peft.get_peft_model(model, settings, **options)
        return adapted

    def _prepare_base(self, model: nn.Module, chosen: dict[str, Any]) -> None:
        pass

    def _options(self) -> dict[str, Any]:
        return {}

    def optimizer(self, model: nn.Module, *, weight_decay: float, **adam: Any) -> torch.optim.Optimizer:
        """AdamW for what is trained; ``adam`` is ``lr``, ``betas``, ``eps`` and perhaps ``fused``."""
        return torch.optim.AdamW(decay_groups(model, weight_decay), **adam)

    def state_bytes(self, model: nn.Module) -> int:
        """Of that optimizer after a step, for ``model`` as :meth:`prepare` returns it."""
        return sum(adamw_bytes([one.shape], one.dtype) for one in model.parameters() if one.requires_grad)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoraConfig(AdapterConfig):
    """DoRA (Liu et al., ICML 2024, arXiv 2402.09353): LoRA for the direction of weights, and a length for each output."""

    name: ClassVar[str] = "dora"

    def _options(self) -> dict[str, Any]:
        return {"use_dora": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraFaConfig(AdapterConfig):
    """LoRA-FA (Zhang et al. 2023, arXiv 2308.03303): first matrices stay frozen, so their inputs are not saved."""

    name: ClassVar[str] = "lora_fa"
    takes_fused: ClassVar[bool] = False

    def prepare(self, model: nn.Module, **options: Any) -> nn.Module:
        """As LoRA has it, with the first matrices frozen."""
        adapted = super().prepare(model, **options)
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(False)
        return adapted

    def optimizer(self, model: nn.Module, *, weight_decay: float, **adam: Any) -> torch.optim.Optimizer:
        """The optimizer of peft, which corrects the gradients of the second matrices for the first."""
        from peft.optimizers import create_lorafa_optimizer

        adapted: Any = model
        alpha: Any = 2 * self.rank if self.alpha is None else self.alpha
        made = create_lorafa_optimizer(adapted, self.rank, alpha, lr=adam["lr"], weight_decay=weight_decay)
        for group in made.param_groups:
            group["betas"], group["eps"] = adam["betas"], adam["eps"]
        return made

    def state_bytes(self, model: nn.Module) -> int:
        """Two moments of each trained weight; steps are counted in Python."""
        return sum(2 * one.nbytes for one in model.parameters() if one.requires_grad)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QloraConfig(AdapterConfig):
    """QLoRA (Dettmers et al., NeurIPS 2023, arXiv 2305.14314): LoRA on frozen weights in 4 bits.

    A model that was loaded in 4 bits is taken as it is; of another, the linear layers of the blocks are quantised here.

    Args:
        quant_type: ``"nf4"`` or ``"fp4"``.
        double_quant: Whether the scales of the blocks of 64 weights are quantised, too.
    """

    name: ClassVar[str] = "qlora"

    quant_type: str = setting("nf4", one_of(("nf4", "fp4")))
    double_quant: bool = setting(True, flag())

    def _prepare_base(self, model: nn.Module, chosen: dict[str, Any]) -> None:
        if getattr(model, "is_loaded_in_4bit", False):
            return
        bitsandbytes: Any = bitsandbytes_for("qlora")
        self.check_layers(chosen)
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
        model.is_loaded_in_4bit = True  # type: ignore[assignment]  # as transformers says it to peft

    def check_layers(self, chosen: Mapping[str, Any]) -> None:
        """Raise :class:`~hf_offload.errors.OffloadConfigError` for a layer that has no form in 4 bits."""
        for name, module in chosen.items():
            if not isinstance(module, nn.Linear):
                raise OffloadConfigError(
                    f"memory_mode='qlora': {name} is a {type(module).__name__}, which bitsandbytes cannot quantise: take "
                    "memory_mode='lora'."
                )

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


def bitsandbytes_for(mode: str) -> Any:
    """The package, or an :class:`~hf_offload.errors.OffloadConfigError` that says how to get it."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise OffloadConfigError(
            f"memory_mode={mode!r} needs bitsandbytes: pip install 'hf-offload[low-bit]'."
        ) from error
    return bitsandbytes


def _peft(mode: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise OffloadConfigError(f"memory_mode={mode!r} needs peft: pip install 'hf-offload[peft]'.") from error
    return peft


def _shape(module: Any) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    rows, columns = module.weight.shape
    return rows, columns


def _short_names(model: nn.Module, chosen: list[str]) -> list[str]:
    """Ends of names where those mean the same layers: an adapter's file is read by people, too."""
    ends = sorted({name.rpartition(".")[2] for name in chosen})
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    return ends if meant == set(chosen) else chosen


def _new_heads(model: nn.Module) -> list[str]:
    """What lies outside of the base model of one for classes: usually drawn at random, so it is trained and saved whole."""
    if _task_type(model) not in _WITH_NEW_HEADS:
        return []
    base = getattr(model, "base_model_prefix", "")
    return [name for name, child in model.named_children() if name != base and any(True for _ in child.parameters())]


def _task_type(model: nn.Module) -> str | None:
    """What peft calls the model's task; None for others, which peft then treats as a plain module."""
    name = type(model).__name__
    known = {
        "ForCausalLM": "CAUSAL_LM",
        "LMHeadModel": "CAUSAL_LM",
        "ForConditionalGeneration": "SEQ_2_SEQ_LM",
        "ForSequenceClassification": "SEQ_CLS",
        "ForTokenClassification": "TOKEN_CLS",
        "ForQuestionAnswering": "QUESTION_ANS",
    }
    found = next((task for end, task in known.items() if name.endswith(end)), None)
    return found if isinstance(model, PreTrainedModel) else None
