"""All weights trained with an optimizer state that is a fraction of AdamW's: memory_mode="galore".

python examples/galore.py
"""

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
        memory_mode="galore",  # or apollo, frugal, lisa, lora, ...: `hf-offload plan MODEL --modes` compares them
        memory_mode_kwargs={"rank": 8},  # yours: 128 and more; a quarter of the width is usual
        offload="ssd",
        offload_directory=output,  # yours: a folder on the SSD
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()

state = trainer.optimizer.state_dict()["state"].values()
state_bytes = sum(value.nbytes for one in state for value in one.values() if torch.is_tensor(value))
print(f"optimizer state: {state_bytes:,} bytes, AdamW's would be {sum(2 * one.nbytes for one in model.parameters()):,}")
