"""Recipes, reports and strategies for tests of the benchmark."""

from hf_offload.training.report import TrainingReport

RANDOM_RECIPE = """
model:
  architecture: gpt2
  config: {n_layer: 2, n_embd: 64, n_head: 2, n_positions: 64, attn_pdrop: 0.1, vocab_size: 300}
data:
  source: random-tokens
  sequence_length: 32
training:
  output_dir: out
  seed: 7
  max_steps: 3
  per_device_train_batch_size: 2
  learning_rate: 1e-3
  save_strategy: no
  disable_tqdm: true
offload: {min_bytes: 1KiB}
"""

TINY_MODEL = "gpt2, 2 layers of width 64, vocabulary 300, dropout 0.1, sdpa attention, float32, 0.1 M parameters"


def fake_report(**changes):
    values = {
        "recipe": "r",
        "settings": {},
        "completed": True,
        "steps": 4,
        "losses": [2.0, 1.5, 1.0, 0.5],
        "losses_hex": [value.hex() for value in (2.0, 1.5, 1.0, 0.5)],
        "parameters_sha256": "same",
        "parameter_count": 10,
        "step_times_s": [9.0, 9.0, 1.0, 1.0],
        "memory": {
            "device": "cpu",
            "baseline_bytes": 1_000_000,
            "peak_bytes": 11_000_000,
            "peak_source": "test",
            "step_start_s": [0.0, 9.0, 18.0, 19.0],
            "step_end_s": [9.0, 18.0, 19.0, 20.0],
            "timeline_s": [18.0, 18.5, 19.0, 19.5],
            "timeline_bytes": [1_000_000, 11_000_000, 1_000_000, 11_000_000],
        },
        "offload": None,
        "allocator": "glibc-tuned",
        "machine": {"cores": 2, "threads": 2, "device": "cpu"},
        "versions": {"torch": "1", "transformers": "2"},
    }
    return TrainingReport(**(values | changes))
