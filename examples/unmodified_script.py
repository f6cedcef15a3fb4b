"""A script that knows nothing of offloading. How it is started says whether and where:

hf-offload launch --config_file examples/unmodified_script.yaml examples/unmodified_script.py --steps 3
HF_OFFLOAD_TIER=ssd accelerate launch -m hf_offload.run examples/unmodified_script.py --steps 3
accelerate launch examples/unmodified_script.py --steps 3     # as ever, nothing is offloaded
"""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
steps = parser.parse_args().steps

torch.manual_seed(0)
# Yours: AutoModelForCausalLM.from_pretrained("..."), and a data set of tokenised rows.
model = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (4 * steps, 128))]

accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(data, batch_size=4)
)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.3f}")
accelerator.end_training()
