"""Tiny models of twenty architectures of transformers, from configurations, with batches that fit and what they generate.

Builders take no weights from anywhere. The same ``seed`` gives the same weights and the same batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers

WORDS = 96
WIDTH = 32
LENGTH = 12
IMAGE = 16

Batch = dict[str, torch.Tensor]
_TOKENS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How a model is made, what it is trained with, and which inputs it generates from, if it generates."""

    make: Callable[[], transformers.PreTrainedModel]
    batch: Callable[[torch.Generator], Batch]
    prompt: Callable[[Batch], Batch] | None = None


def _words(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(2, WORDS, (2, length), generator=generator)


def _causal(generator: torch.Generator) -> Batch:
    words = _words(generator)
    return {"input_ids": words, "labels": words.clone()}


def _masked(generator: torch.Generator) -> Batch:
    words = _words(generator)
    attended = torch.ones_like(words)
    attended[0, LENGTH // 2 :] = 0
    return {"input_ids": words, "attention_mask": attended, "labels": words.clone()}


def _pairs(generator: torch.Generator) -> Batch:
    return {"input_ids": _words(generator), "labels": _words(generator, 8)}


def _images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(2, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (2,), generator=generator)}


def _images_and_words(generator: torch.Generator) -> Batch:
    pixels = torch.randn(2, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "input_ids": _words(generator), "return_loss": torch.tensor(True)}


def _sound(generator: torch.Generator) -> Batch:
    return {"input_values": torch.randn(2, 640, generator=generator), "labels": _words(generator, 4)}


def _mel(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": _words(generator, 8)}


def _first_words(batch: Batch) -> Batch:
    return {"input_ids": batch["input_ids"][:, :4]}


def _only(*names: str) -> Callable[[Batch], Batch]:
    return lambda batch: {name: batch[name] for name in names}


def _of(model: Any, config: Any, **options: Any) -> Callable[[], transformers.PreTrainedModel]:
    return lambda: model(config(**options))


_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_GROUPED = {**_SIZES, **_TOKENS, "num_key_value_heads": 2}

ARCHITECTURES = {
    # Decoders
    "gpt2": Architecture(
        _of(
            transformers.GPT2LMHeadModel, transformers.GPT2Config, vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=2,
            n_positions=64, **_TOKENS,
        ), _causal, _first_words,
    ),
    "llama": Architecture(
        _of(transformers.LlamaForCausalLM, transformers.LlamaConfig, **_GROUPED), _causal, _first_words
    ),
    "gemma2": Architecture(
        _of(
            transformers.Gemma2ForCausalLM, transformers.Gemma2Config, **_GROUPED, head_dim=8, sliding_window=8,
            attention_dropout=0.1,
        ), _causal, _first_words,
    ),
    "phi": Architecture(
        _of(transformers.PhiForCausalLM, transformers.PhiConfig, **_GROUPED, resid_pdrop=0.1), _causal, _first_words
    ),
    "falcon": Architecture(
        _of(
            transformers.FalconForCausalLM, transformers.FalconConfig, vocab_size=WORDS, hidden_size=WIDTH,
            num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0.1, **_TOKENS,
        ), _causal, _first_words,
    ),
    "bloom": Architecture(
        _of(
            transformers.BloomForCausalLM, transformers.BloomConfig, vocab_size=WORDS, hidden_size=WIDTH, n_layer=2,
            n_head=4, hidden_dropout=0.1, **_TOKENS,
        ), _causal, _first_words,
    ),
    # Encoders
    "bert": Architecture(_of(transformers.BertForMaskedLM, transformers.BertConfig, **_SIZES, **_DROPOUT), _masked),
    "roberta": Architecture(
        _of(transformers.RobertaForMaskedLM, transformers.RobertaConfig, **_SIZES, **_DROPOUT, **_TOKENS), _masked
    ),
    "deberta": Architecture(
        _of(
            transformers.DebertaV2ForMaskedLM, transformers.DebertaV2Config, **_SIZES, **_DROPOUT,
            relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8,
        ), _masked,
    ),
    "albert": Architecture(  # one block, used twice
        _of(
            transformers.AlbertForMaskedLM, transformers.AlbertConfig, **_SIZES, **_DROPOUT, embedding_size=16,
        ), _masked,
    ),
    # Encoders with decoders, whose embeddings are shared
    "t5": Architecture(
        _of(
            transformers.T5ForConditionalGeneration, transformers.T5Config, vocab_size=WORDS, d_model=WIDTH,
            d_ff=2 * WIDTH, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0,
        ), _pairs, _only("input_ids"),
    ),
    "bart": Architecture(
        _of(
            transformers.BartForConditionalGeneration, transformers.BartConfig, vocab_size=WORDS, d_model=WIDTH,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH, max_position_embeddings=64, encoder_layerdrop=0.2,
            decoder_start_token_id=2, forced_eos_token_id=None, **_TOKENS,
        ), _pairs, _only("input_ids"),
    ),
    # Mixtures of experts
    "mixtral": Architecture(
        _of(
            transformers.MixtralForCausalLM, transformers.MixtralConfig, **_GROUPED, num_local_experts=4,
            num_experts_per_tok=2, output_router_logits=True,
        ), _causal, _first_words,
    ),
    "qwen2_moe": Architecture(
        _of(
            transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig, **_GROUPED, moe_intermediate_size=WIDTH,
            shared_expert_intermediate_size=WIDTH, num_experts=4, num_experts_per_tok=2,
        ), _causal, _first_words,
    ),
    # Images
    "vit": Architecture(
        _of(
            transformers.ViTForImageClassification, transformers.ViTConfig, hidden_size=WIDTH,
            intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=4, image_size=IMAGE, patch_size=4,
            num_labels=5, **_DROPOUT,
        ), _images,
    ),
    "swin": Architecture(
        _of(
            transformers.SwinForImageClassification, transformers.SwinConfig, image_size=IMAGE, patch_size=2,
            embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5,
        ), _images,
    ),
    "clip": Architecture(
        lambda: transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config={**_SIZES, **_TOKENS}, projection_dim=16,
                vision_config={**_SIZES, "image_size": IMAGE, "patch_size": 4},
            )
        ), _images_and_words,
    ),
    # Speech
    "wav2vec2": Architecture(
        _of(
            transformers.Wav2Vec2ForCTC, transformers.Wav2Vec2Config, **_SIZES, conv_dim=(16, 16), conv_kernel=(8, 3),
            conv_stride=(4, 2), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, num_feat_extract_layers=2,
            mask_time_prob=0.0, layerdrop=0.0, **_TOKENS,
        ), _sound,
    ),
    "whisper": Architecture(
        _of(
            transformers.WhisperForConditionalGeneration, transformers.WhisperConfig, vocab_size=WORDS, d_model=WIDTH,
            num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH, max_source_positions=16, max_target_positions=32,
            dropout=0.1, decoder_start_token_id=2, suppress_tokens=None, begin_suppress_tokens=None, **_TOKENS,
        ), _mel, _only("input_features"),
    ),
    # State spaces
    "mamba": Architecture(
        _of(
            transformers.MambaForCausalLM, transformers.MambaConfig, vocab_size=WORDS, hidden_size=WIDTH, state_size=4,
            num_hidden_layers=2, **_TOKENS,
        ), _causal, _first_words,
    ),
}  # fmt: skip


def make_model(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """The architecture ``name`` with random weights, in training mode, in float32 on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ARCHITECTURES[name].make()
        with torch.no_grad():
            for parameter in model.parameters():
                # Biases and norms begin as zeros and ones. Distinct values keep mistakes from hiding behind them.
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.train()


def make_batch(name: str, seed: int) -> Batch:
    """Two random examples for the architecture ``name``, labels included."""
    return ARCHITECTURES[name].batch(torch.Generator().manual_seed(seed))


def generate(name: str, model: Any, seed: int) -> torch.Tensor | None:
    """What the model generates greedily from a random batch; None of an architecture that does not generate."""
    prompt = ARCHITECTURES[name].prompt
    if prompt is None:
        return None
    tokens: torch.Tensor = model.generate(
        **prompt(make_batch(name, seed)), max_new_tokens=5, min_new_tokens=5, do_sample=False
    )
    return tokens
