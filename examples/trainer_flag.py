"""The shortest use: the Trainer, a small model with random weights, and one argument.

python examples/trainer_flag.py [directory for activations]
"""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from hf_offload import OffloadTrainingArguments


def main() -> None:
    """Train three steps; the last line of the log has the offload/* counters."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=512, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(0, 512, (12, 128))
    with tempfile.TemporaryDirectory() as work:
        arguments = OffloadTrainingArguments(
            output_dir=work,
            max_steps=3,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="no",
            dataloader_pin_memory=torch.accelerator.is_available(),
            offload="ssd",
            offload_dir=sys.argv[1] if len(sys.argv) > 1 else None,
        )
        Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]).train()


if __name__ == "__main__":
    main()
