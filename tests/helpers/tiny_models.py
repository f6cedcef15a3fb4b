"""Tiny models of several architectures, built from configurations: two blocks, hidden size 32, and batches that fit.

Builders take no weights from anywhere. The same ``seed`` gives the same weights and the same batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 96
HIDDEN = 32
SEQUENCE = 24
IMAGE = 16


@dataclasses.dataclass(frozen=True)
class _Architecture:
    config: Callable[[float], transformers.PretrainedConfig]
    model: type[transformers.PreTrainedModel]
    batch: Callable[[int, torch.Generator], dict[str, torch.Tensor]]


def _gpt2(dropout: float) -> transformers.PretrainedConfig:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=2, n_positions=64,
        attn_pdrop=dropout, embd_pdrop=dropout, resid_pdrop=dropout, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip


def _gpt_neox(dropout: float) -> transformers.PretrainedConfig:
    return transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, hidden_dropout=dropout, attention_dropout=dropout,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip


def _bert(dropout: float) -> transformers.PretrainedConfig:
    return transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip


def _t5(dropout: float) -> transformers.PretrainedConfig:
    return transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_ff=2 * HIDDEN, d_kv=HIDDEN // 2, num_layers=2, num_decoder_layers=2,
        num_heads=2, dropout_rate=dropout, decoder_start_token_id=0,
    )  # fmt: skip


def _llama(dropout: float) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, attention_dropout=dropout,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip


def _mixtral(dropout: float) -> transformers.PretrainedConfig:
    return transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, attention_dropout=dropout, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip


def _vit(dropout: float) -> transformers.PretrainedConfig:
    return transformers.ViTConfig(
        image_size=IMAGE, patch_size=4, num_channels=3, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN,
        num_hidden_layers=2, num_attention_heads=2, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, num_labels=5,
    )  # fmt: skip


def _tokens(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (size, SEQUENCE), generator=generator)


def _causal(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = _tokens(size, generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = _tokens(size, generator)
    attended = torch.ones_like(tokens)
    attended[0, SEQUENCE // 2 :] = 0  # one padded row, so that a mask is at work
    chosen = torch.rand(tokens.shape, generator=generator) < 0.3
    chosen[:, 0] = True  # never a row without a label
    return {"input_ids": tokens, "attention_mask": attended, "labels": torch.where(chosen, tokens, -100)}


def _pairs(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(size, generator), "labels": _tokens(size, generator)[:, : SEQUENCE // 2].contiguous()}


def _images(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(size, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(0, 5, (size,), generator=generator),
    }


_ARCHITECTURES = {
    "gpt2": _Architecture(_gpt2, transformers.GPT2LMHeadModel, _causal),
    "gpt_neox": _Architecture(_gpt_neox, transformers.GPTNeoXForCausalLM, _causal),
    "bert": _Architecture(_bert, transformers.BertForMaskedLM, _masked),
    "t5": _Architecture(_t5, transformers.T5ForConditionalGeneration, _pairs),
    "llama": _Architecture(_llama, transformers.LlamaForCausalLM, _causal),
    "vit": _Architecture(_vit, transformers.ViTForImageClassification, _images),
    "mixtral": _Architecture(_mixtral, transformers.MixtralForCausalLM, _causal),
}

NAMES = tuple(_ARCHITECTURES)


def tiny_model(
    name: str, *, dropout: float = 0.1, attention: str = "sdpa", seed: int = 0
) -> transformers.PreTrainedModel:
    """The architecture ``name`` (one of :data:`NAMES`) with random weights, in training mode, in float32 on the CPU."""
    architecture = _ARCHITECTURES[name]
    config = architecture.config(dropout)
    config._attn_implementation = attention
    config.use_cache = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture.model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Biases and norms begin as zeros and ones. Distinct values keep mistakes from hiding behind them.
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.train()


def tiny_batch(name: str, *, size: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch of ``size`` random examples for the architecture ``name``, labels included."""
    return _ARCHITECTURES[name].batch(size, torch.Generator().manual_seed(seed))


class ExampleDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """``count`` random examples for the architecture ``name``, as the Trainer takes them."""

    def __init__(self, name: str, count: int, seed: int = 0):
        self._columns = tiny_batch(name, size=count, seed=seed)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return {key: column[index] for key, column in self._columns.items()}


def switch_on_checkpointing(model: nn.Module, *options: Any) -> None:
    """Under the name that transformers has for it: the older one brings a warning."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    next(getattr(model, name) for name in names if hasattr(model, name))(*options)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every gradient by the parameter's name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def hooks_on(model: nn.Module) -> list[Any]:
    """All forward hooks of a model's modules."""
    modules = list(model.modules())
    return [hook for one in modules for hook in (*one._forward_pre_hooks.values(), *one._forward_hooks.values())]
