"""Optimizer state and gradients on a drive are not in memory: counted by the allocator, over whole steps."""

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig
from hf_offload.session import attach
from tests.helpers.live_bytes import peak_bytes_in_use

LAYERS, WIDTH = 64, 1024


def peak_of_training(place, folder):
    """Most bytes in use at once, weights left out, from before the optimizer is made until it has been saved."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    files = {} if place == "none" else {"directory": folder}

    def work():
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        session = attach(model, OffloadConfig(tier="none", optimizer=place, **files))
        session.prepare_optimizer(optimizer)
        session.defer_updates()
        for _ in range(3):
            model(torch.ones(2, WIDTH)).square().mean().backward()
            session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    return peak_bytes_in_use(work)


def test_no_more_than_the_windows_of_transfers_is_in_memory(tmp_path):
    kept = 3 * LAYERS * WIDTH * WIDTH * 4  # two moments and the gradient
    in_memory = peak_of_training("none", tmp_path)
    if in_memory is None:
        pytest.skip("the allocator does not tell what is in use")
    assert in_memory > 0.95 * kept
    # The windows, 96 MiB for state and as much for gradients, may be full where the drive is slow.
    assert peak_of_training("ssd", tmp_path) < 0.5 * kept
