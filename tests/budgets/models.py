"""Small models of many architectures: activations outweigh weights, so that a budget has something to decide about."""

import types
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, TOKENS = 512, 128

Inputs = dict[str, torch.Tensor]


def _text(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "use_cache": False,
        **more,
    }


def _decoder(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}
    return _text(**sizes, max_position_embeddings=TOKENS, **more)


def _encoder(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
    return {"vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, **sizes, **more}


def _causal(config: Any) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config)


def _seq2seq(config: Any) -> nn.Module:
    return transformers.AutoModelForSeq2SeqLM.from_config(config)


class SentencePairs(nn.Module):
    """Sentence Transformers' way of calling: one encoder, a dictionary as its only argument, several calls a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = transformers.BertModel(transformers.BertConfig(**_encoder()))

    def forward(self, features: Inputs) -> dict[str, torch.Tensor]:
        hidden = self.encoder(**features).last_hidden_state
        return {"sentence_embedding": hidden.mean(dim=1)}


class Recurrent(nn.Module):
    """LSTM layers, whose kernels take much memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(64, 64, batch_first=True) for _ in range(3))
        self.head = nn.Linear(64, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> types.SimpleNamespace:
        for layer in self.layers:
            inputs = layer(inputs)[0]
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(self.head(inputs[:, -1]), labels))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "opt": lambda: _causal(
        transformers.OPTConfig(
            **_text(), hidden_size=128, ffn_dim=512, num_hidden_layers=6, num_attention_heads=4,
            max_position_embeddings=TOKENS, word_embed_proj_dim=128,
        )
    ),
    "qwen3": lambda: _causal(transformers.Qwen3Config(**_decoder(num_key_value_heads=2, head_dim=32))),
    "mistral": lambda: _causal(transformers.MistralConfig(**_decoder(num_key_value_heads=2))),
    "phi3": lambda: _causal(transformers.Phi3Config(**_decoder(num_key_value_heads=2))),
    "bloom": lambda: _causal(transformers.BloomConfig(**_text(), hidden_size=128, n_layer=6, n_head=4)),
    "qwen2_moe": lambda: _causal(
        transformers.Qwen2MoeConfig(
            **_decoder(num_key_value_heads=2), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
            shared_expert_intermediate_size=256,
        )
    ),
    "mamba": lambda: _causal(
        transformers.MambaConfig(**_text(), hidden_size=64, num_hidden_layers=3, state_size=8, expand=2)
    ),
    "electra": lambda: transformers.ElectraForMaskedLM(transformers.ElectraConfig(**_encoder(embedding_size=128))),
    "pegasus": lambda: _seq2seq(
        transformers.PegasusConfig(
            **_text(decoder_start_token_id=0), d_model=128, encoder_ffn_dim=512, decoder_ffn_dim=512, encoder_layers=3,
            decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=TOKENS,
        )
    ),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            **_text(decoder_start_token_id=1), d_model=128, encoder_ffn_dim=512, decoder_ffn_dim=512, encoder_layers=3,
            decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4, num_mel_bins=32,
            max_source_positions=TOKENS, max_target_positions=TOKENS,
        )
    ),
    "wav2vec2_conformer": lambda: transformers.Wav2Vec2ConformerForSequenceClassification(
        transformers.Wav2Vec2ConformerConfig(
            hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, conv_dim=(64, 64, 64),
            conv_stride=(5, 4, 4), conv_kernel=(10, 8, 4), num_feat_extract_layers=3, num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4, conv_depthwise_kernel_size=7, apply_spec_augment=False,
        )
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=128, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, image_size=64, patch_size=8
        )
    ),
    "swin": lambda: transformers.SwinForImageClassification(
        transformers.SwinConfig(
            image_size=64, patch_size=2, embed_dim=48, depths=[2, 2, 2], num_heads=[2, 4, 8], window_size=4
        )
    ),
    "segformer": lambda: transformers.SegformerForSemanticSegmentation(
        transformers.SegformerConfig(
            hidden_sizes=[32, 64, 128, 128], depths=[2, 2, 2, 2], num_attention_heads=[1, 2, 4, 4], decoder_hidden_size=64,
            num_labels=5,
        )
    ),
    "clip": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**_encoder(num_hidden_layers=4), "projection_dim": 64, "max_position_embeddings": 64},
            vision_config={
                "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
                "image_size": 64, "patch_size": 8, "projection_dim": 64,
            },
            projection_dim=64,
        )
    ),
    "sentence_pairs": SentencePairs,
    "lstm": Recurrent,
}  # fmt: skip


def build(name: str) -> nn.Module:
    """The model of that name, in training mode, the same at each call."""
    torch.manual_seed(0)
    return MODELS[name]().train()


def batch(name: str, rows: int = 16, seed: int = 0, tokens: int = TOKENS) -> Any:
    """Inputs of one forward: what :func:`loss` takes."""
    draw = torch.Generator().manual_seed(seed)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (rows, length), generator=draw)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=draw)

    def classes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 2, (rows, *shape), generator=draw)

    if name == "sentence_pairs":
        return [{"input_ids": ids(tokens)}, {"input_ids": ids(tokens // 2)}]
    if name in ("vit", "swin"):
        return {"pixel_values": noise(3, 64, 64), "labels": classes()}
    if name == "lstm":
        return {"inputs": noise(tokens, 64), "labels": classes()}
    if name == "segformer":
        return {"pixel_values": noise(3, 128, 128), "labels": classes(128, 128)}
    if name == "clip":
        return {"pixel_values": noise(3, 64, 64), "input_ids": ids(64), "return_loss": True}
    if name == "whisper":
        return {"input_features": noise(32, 2 * TOKENS), "labels": ids(tokens // 2)}
    if name == "wav2vec2_conformer":
        return {"input_values": noise(80 * tokens), "labels": classes()}
    tensor = ids(tokens // 2 if name == "mamba" else tokens)  # which goes through them one by one
    return {"input_ids": tensor, "labels": ids(tokens // 2) if name == "pegasus" else tensor}


def loss(model: nn.Module, inputs: Any) -> torch.Tensor:
    """The loss of one forward, or of the several that belong together."""
    if isinstance(inputs, list):
        one, other = (model(part)["sentence_embedding"] for part in inputs)
        return nn.functional.cross_entropy(one @ other.T, torch.arange(len(one)))
    return model(**inputs).loss
