"""Weight gradients estimated from three tenths of the rows (WTA-CRS): how far off they are, then a training with them.

python examples/sampled_linear.py
"""

import logging
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from hf_offload import OffloadTrainingArguments, SampledLinearConfig, measure_errors

logging.basicConfig()
logging.getLogger("hf_offload").setLevel(logging.INFO)  # says how many layers are sampled

torch.manual_seed(0)
# Yours: AutoModelForCausalLM.from_pretrained("..."), and a data set of tokenised rows.
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (12, 128))]

batch = {name: torch.stack([row[name] for row in data[:4]]) for name in data[0]}
for layer in measure_errors(model, batch, SampledLinearConfig(), ratios=(0.1, 0.3, 0.5)):
    errors = ", ".join(f"{error:.2f} at {ratio}" for ratio, error in layer.errors.items())
    print(f"{layer.name}: error over the gradient's norm {errors}")

with tempfile.TemporaryDirectory() as output:
    arguments = OffloadTrainingArguments(
        output_dir=output,
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        dataloader_pin_memory=torch.accelerator.is_available(),
        sampled_linear=0.3,
    )
    Trainer(model, arguments, train_dataset=data).train()
