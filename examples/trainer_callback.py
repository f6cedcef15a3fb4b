"""A Trainer whose arguments are not yours to change: a callback.

python examples/trainer_callback.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_offload import OffloadCallback, OffloadConfig

torch.manual_seed(0)
# Yours: AutoModelForCausalLM.from_pretrained("..."), and a data set of tokenised rows.
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (12, 128))]

with tempfile.TemporaryDirectory() as output:
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=3,
        per_device_train_batch_size=4,
        save_strategy="no",
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    callback = OffloadCallback(OffloadConfig(tier="ssd", directory=output))  # yours: a folder on the SSD
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()

print(callback.stats.total)
