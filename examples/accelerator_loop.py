"""A loop of your own with Accelerate: an OffloadPlugin makes the Accelerator, nothing else changes.

python examples/accelerator_loop.py
"""

import logging
import tempfile

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hf_offload import OffloadPlugin

logging.basicConfig()
logging.getLogger("hf_offload").setLevel(logging.INFO)  # says what is moved, and a summary at the end

torch.manual_seed(0)
# Yours: AutoModelForCausalLM.from_pretrained("..."), and a data set of tokenised rows.
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (12, 128))]

with tempfile.TemporaryDirectory() as directory:  # yours: a folder on the SSD
    accelerator = OffloadPlugin(tier="ssd", directory=directory).accelerator()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(data, batch_size=4)
    )
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.3f}")
    accelerator.end_training()
