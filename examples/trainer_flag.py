"""The shortest use: the Trainer, and one argument.

python examples/trainer_flag.py [directory for activations]
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from hf_offload import OffloadTrainingArguments

torch.manual_seed(0)
# Yours: AutoModelForCausalLM.from_pretrained("..."), and a data set of tokenised rows.
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (12, 128))]

with tempfile.TemporaryDirectory() as output:
    arguments = OffloadTrainingArguments(
        output_dir=output,
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        dataloader_pin_memory=torch.accelerator.is_available(),
        offload="ssd",
        offload_directory=sys.argv[1] if len(sys.argv) > 1 else None,
    )
    Trainer(model, arguments, train_dataset=data).train()  # the log has offload/moved_gib and others
