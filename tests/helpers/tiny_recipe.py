"""A recipe that trains in a second, with its data."""

from pathlib import Path

TINY_RECIPE = """
model:
  architecture: gpt2
  config: {n_layer: 2, n_embd: 64, n_head: 2, n_positions: 64, attn_pdrop: 0.1}
data:
  files: [text.txt]
  tokenizer: {train_bpe: 300}
  sequence_length: 32
training:
  output_dir: out
  seed: 7
  max_steps: 4
  per_device_train_batch_size: 2
  learning_rate: 1e-3
  save_strategy: no
  disable_tqdm: true
"""


def write_tiny_recipe(folder: Path) -> Path:
    """Write the recipe, the text that it trains on and a folder for a tier."""
    words = ["offload", "saved", "tensor", "gradient", "exact", "disk", "memory", "step", "block", "layer"]
    text = "\n".join(" ".join(words[(i * j) % 10] for j in range(1, 12)) for i in range(200))
    (folder / "text.txt").write_text(text)
    (folder / "tier").mkdir()
    path = folder / "tiny.yaml"
    path.write_text(TINY_RECIPE)
    return path
