"""A model whose weights, gradients and optimizer state are on a drive: a part of it is in memory at any time.

python examples/larger_than_memory.py
"""

import tempfile

import torch
from torch import nn

from hf_offload import OffloadConfig, attach

torch.manual_seed(0)
# Yours: any model. One that does not fit into memory when it is made is loaded with hf_offload.load_pretrained.
layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)]
model = nn.Sequential(*layers, nn.Linear(256, 10))
loader = [(torch.randn(512, 256), torch.randint(0, 10, (512,))) for _ in range(3)]

with tempfile.TemporaryDirectory() as directory:  # yours: a folder on the SSD
    session = attach(model, OffloadConfig(tier="none", params="ssd", optimizer="ssd", directory=directory))
    optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    for rows, labels in loader:
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
        print(f"loss {loss.item():.3f}")
    weights = session.residency
    print(f"{weights.total_bytes:,} bytes of weights, at most {weights.most_bytes:,} of them in memory")
    with session.weights(model[-1]):  # for code that takes memory without PyTorch's knowing
        print(f"largest of the last layer: {abs(model[-1].weight.detach().numpy()).max():.3f}")
    session.detach()
