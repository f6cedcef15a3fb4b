"""LoRA with peft: adapters shrink gradients and optimizer state, offloading the activations they leave.

python examples/peft_lora.py     # after: pip install 'hf-offload[peft]'
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from hf_offload import OffloadTrainingArguments

torch.manual_seed(0)
# Yours: AutoModelForCausalLM.from_pretrained("...", dtype="bfloat16"), and a data set of tokenised rows.
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (12, 128))]

# In one line of the arguments instead: memory_mode="lora", memory_mode_kwargs={"rank": 8}
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model.print_trainable_parameters()

with tempfile.TemporaryDirectory() as output:
    arguments = OffloadTrainingArguments(
        output_dir=output,
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        dataloader_pin_memory=torch.accelerator.is_available(),
        offload="ssd",
        offload_directory=output,  # yours: a folder on the SSD
    )
    Trainer(model, arguments, train_dataset=data).train()
