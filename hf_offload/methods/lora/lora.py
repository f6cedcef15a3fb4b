"""The memory mode lora: adapters on frozen weights, made by peft. lora_fa and dora are subclasses."""

import types
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from hf_offload.errors import OffloadConfigError
from hf_offload.methods.param_groups import WeightDecay, decay_groups
from hf_offload.methods.projected.sizes import adamw_bytes
from hf_offload.methods.protocol import MemoryMode, load_library, trained_parameters
from hf_offload.settings.classes import settings
from hf_offload.settings.values import Number, Whole, names
from hf_offload.structure.linears import chosen_linears

_WITH_NEW_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")


@settings(frozen=True, kw_only=True)
class Lora(MemoryMode):
    """LoRA (Hu et al., ICLR 2022, arXiv 2106.09685): a product of two small matrices added to each chosen linear layer.

    Args:
        rank: Of the product.
        alpha: The product is multiplied by ``alpha / rank``. Default: twice the rank.
        dropout: Of the adapters' inputs, 0 to below 1.
        targets: ``"auto"``: the linear layers of the repeated blocks, GPT-2's ``Conv1D`` included. ``"all"``: those outside
            of them too, but not the output head. Or ends of module names.
    """

    name: ClassVar[str] = "lora"
    takes_fused: ClassVar[bool] = True

    rank: Annotated[Whole, Field(ge=1)] = 16
    alpha: Annotated[Number | None, Field(gt=0)] = None
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[str | Sequence[str], names("ends of module names", alone=("auto", "all"))] = "auto"

    def prepare(self, model: nn.Module, **options: Any) -> nn.Module:
        """``model`` with adapters, the only weights that are trained; ``options`` are for ``peft.get_peft_model``.

        Raises :class:`~hf_offload.errors.OffloadConfigError` if targets match nothing, if a layer is smaller than the rank,
        or if there are adapters already.
        """
        peft = load_library("peft", self.name, "'hf-offload[peft]'")
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

    def prepare_in_place(self, model: nn.Module) -> None:
        """The layers of ``model`` get adapters; its ``save_pretrained`` saves those alone."""
        self.prepare(model)
        if isinstance(model, PreTrainedModel):
            model._hf_peft_config_loaded = True

    def prepare_fake(self, model: nn.Module) -> nn.Module:
        """By peft itself, which moves adapters with ``Module.to``. Fake tensors cannot do that, but those of the meta device
        can.
        """
        with unset_fake_temporarily():
            _put_on(model, "meta")
            adapted = self.prepare(model, low_cpu_mem_usage=True)
        _put_on(adapted, "cpu")
        return adapted

    def _prepare_base(self, model: nn.Module, chosen: dict[str, Any]) -> None:
        pass

    def _options(self) -> dict[str, Any]:
        return {}

    def optimizer(self, model: nn.Module, *, weight_decay: WeightDecay, **adam: Any) -> torch.optim.Optimizer:
        """AdamW for what is trained; ``adam`` is ``lr``, ``betas``, ``eps`` and perhaps ``fused``."""
        return torch.optim.AdamW(decay_groups(model, weight_decay), **adam)

    def state_bytes(self, model: nn.Module) -> int:
        """Of that optimizer after a step, for ``model`` as :meth:`prepare` returns it."""
        return sum(adamw_bytes([one.shape], one.dtype) for one in trained_parameters(model))


def _put_on(model: nn.Module, device: str) -> None:
    """Other parameters of the same shapes in place of the model's; those that were one stay one."""
    others: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in others:
                others[old] = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device), old.requires_grad)
            setattr(module, name, others[old])


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


@settings(frozen=True, kw_only=True)
class LoraFa(Lora):
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

    def optimizer(self, model: nn.Module, *, weight_decay: WeightDecay, **adam: Any) -> torch.optim.Optimizer:
        """The optimizer of peft, which corrects the gradients of the second matrices for the first."""
        from peft import PeftModel
        from peft.optimizers import create_lorafa_optimizer

        adapted: Any = model
        if not isinstance(model, PeftModel):  # its adapters are in a model that a script holds
            adapted = types.SimpleNamespace(
                active_adapters=list(adapted.peft_config),
                peft_config=adapted.peft_config,
                named_parameters=model.named_parameters,
                get_submodule=model.get_submodule,
            )
        if callable(weight_decay):
            rates = {weight_decay(one, True) for one in trained_parameters(model)}
            if len(rates) > 1:
                raise OffloadConfigError(
                    f"memory_mode='lora_fa' has one weight_decay for all parameters, and the optimizer has {rates}: "
                    "give all groups the same, or use memory_mode='lora'."
                )
            (weight_decay,) = rates
        alpha: Any = 2 * self.rank if self.alpha is None else self.alpha
        made = create_lorafa_optimizer(adapted, self.rank, alpha, lr=adam["lr"], weight_decay=weight_decay)
        for group in made.param_groups:
            group["betas"], group["eps"] = adam["betas"], adam["eps"]
        return made

    def state_bytes(self, model: nn.Module) -> int:
        """Two moments of each trained weight; steps are counted in Python."""
        return sum(2 * one.nbytes for one in trained_parameters(model))

    def step_bytes(self, model: nn.Module, *, on_cpu: bool, fused: bool) -> int:
        """One weight after the other, on every device."""
        return super().step_bytes(model, on_cpu=True, fused=fused)


@settings(frozen=True, kw_only=True)
class Dora(Lora):
    """DoRA (Liu et al., ICML 2024, arXiv 2402.09353): LoRA for the direction of weights, and a length for each output."""

    name: ClassVar[str] = "dora"

    def _options(self) -> dict[str, Any]:
        return {"use_dora": True}
