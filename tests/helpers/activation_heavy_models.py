"""Models whose activations outweigh their weights: width 128, rows of 128 tokens."""

import torch
import transformers

ROWS, TOKENS, VOCABULARY = 8, 128, 512

CONFIGS = {
    "gpt2": lambda dropout, layers=3: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=128, n_layer=layers, n_head=4, n_positions=128, use_cache=False,
        attn_pdrop=dropout, embd_pdrop=dropout, resid_pdrop=dropout, bos_token_id=1, eos_token_id=1,
    ),
    "gpt_neox": lambda dropout, layers=3: transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=128, hidden_dropout=dropout, attention_dropout=dropout, use_cache=False,
        bos_token_id=1, eos_token_id=1,
    ),
    "bert": lambda dropout, layers=3: transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=128, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    ),
    "t5": lambda dropout, layers=3: transformers.T5Config(
        vocab_size=VOCABULARY, d_model=128, d_ff=512, d_kv=32, num_layers=layers - layers // 2,
        num_decoder_layers=layers // 2, num_heads=4,
        dropout_rate=dropout, decoder_start_token_id=0, use_cache=False,
    ),
    "llama": lambda dropout, layers=3: transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, attention_dropout=dropout, use_cache=False,
        bos_token_id=1, eos_token_id=1,
    ),
    # nobody tuned anything for this one
    "bloom": lambda dropout, layers=3: transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=128, n_layer=layers, n_head=4, hidden_dropout=dropout, attention_dropout=dropout,
        use_cache=False, bos_token_id=1, eos_token_id=1,
    ),
}  # fmt: skip
CLASSES = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}


def build(name, dropout, layers=3):
    config = CONFIGS[name](dropout, layers)
    return CLASSES.get(name, transformers.AutoModelForCausalLM).from_config(config).train()


def batch():
    tokens = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens.clone()}
