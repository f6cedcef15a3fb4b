"""Four families of models, of the same size: weights and state weigh about as much as activations."""

from typing import Any

import torch
from torch import nn

FAMILIES = ("gpt", "bert", "t5", "llama")
VOCABULARY = 1024
HEAD_WIDTH = 64


def build(family: str, layers: int, width: int, tokens: int) -> nn.Module:
    """A model of random weights, the same at each call, in the mode of training."""
    import transformers

    torch.manual_seed(0)
    heads = width // HEAD_WIDTH
    text: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    usual: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    if family == "gpt":
        config: Any = transformers.GPT2Config(
            **text, n_embd=width, n_layer=layers, n_head=heads, n_positions=tokens, use_cache=False
        )
        return transformers.GPT2LMHeadModel(config).train()
    if family == "bert":
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, **usual, intermediate_size=4 * width, max_position_embeddings=tokens
        )
        return transformers.BertForMaskedLM(config).train()
    if family == "t5":
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY, "d_model": width, "d_ff": 4 * width, "d_kv": HEAD_WIDTH, "num_heads": heads,
            "num_layers": layers // 2, "num_decoder_layers": layers - layers // 2, "decoder_start_token_id": 0,
        }  # fmt: skip
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, use_cache=False)).train()
    config = transformers.LlamaConfig(
        **text, **usual, num_key_value_heads=heads, intermediate_size=8 * width // 3, max_position_embeddings=tokens,
        use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def batch(rows: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Random tokens of one step."""
    words = torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": words, "labels": words.clone()}
