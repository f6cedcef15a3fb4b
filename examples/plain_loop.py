"""A loop of plain PyTorch, for any module: what a context manager saves.

python examples/plain_loop.py
"""

import tempfile

import torch
from torch import nn

from hf_offload import OffloadConfig, offload_activations

torch.manual_seed(0)
# Yours: any module on any one device, and any loader.
layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(256, 10))
loader = [(torch.randn(512, 256), torch.randint(0, 10, (512,))) for _ in range(3)]

optimizer = torch.optim.AdamW(model.parameters())
with (
    tempfile.TemporaryDirectory() as directory,  # yours: a folder on the SSD
    offload_activations(model, OffloadConfig(tier="ssd", directory=directory)) as session,
):
    for rows, labels in loader:
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
        step = session.stats.steps[-1]
        print(f"loss {loss.item():.3f}, {step.offloaded_bytes:,} bytes moved, {step.stall_s:.3f} s waited")

print(session.stats.total)
