"""Transforms of a model with what moves: the bits of the same transform in memory, and no more bytes saved than there."""

import contextlib

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, offload_activations
from tests.helpers.tiny_models import gradients, tiny_batch, tiny_model
from tests.helpers.train import assert_same, copied

TRANSFORMS = {
    "none": {},
    "elementwise": {"recompute_elementwise": "exact"},
    "sampled": {"sampled_linear": {"ratio": 0.25, "min_rows": 1}},
    "tiled loss": {"tiled_loss": "on", "tile_bytes": 4096},
    "tiled mlp": {"tiled_mlp": "on", "tile_bytes": 4096},
}
MOVES = {
    "activations": {"tier": "ssd"},
    "planned": {"tier": "auto", "memory_budget": "1GiB"},
    "weights and state": {"tier": "none", "params": "ssd", "optimizer": "ssd"},
}


@pytest.fixture(autouse=True)
def known_machine(machine_with_drive):
    machine_with_drive(1e9)


class Saved:
    """Bytes of activations that autograd saves."""

    def __init__(self):
        self.nbytes = 0

    def count(self, tensor):
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            self.nbytes += tensor.nbytes
        return tensor


def run(name, config):
    """Losses, gradients and weights of some steps; the bytes that autograd has saved; and the session."""
    torch.manual_seed(0)
    model = tiny_model(name)
    with offload_activations(model, config) as session:
        optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        session.defer_updates()
        if session.residency is not None:
            session.residency.limit_bytes = 1
        found, saved = [], Saved()
        torch.manual_seed(5)
        for step in range(3):
            # A model leaves its activations to hooks that it is called in.
            counts = torch.autograd.graph.saved_tensors_hooks(saved.count, lambda tensor: tensor)
            with counts if config.tier == "none" else contextlib.nullcontext():
                loss = model(**tiny_batch(name, seed=step)).loss
            loss.backward()
            found.append([loss.detach(), copied(gradients(model))])
            optimizer.step()
            optimizer.zero_grad()
            session.end_step()
        return [found, copied(model.state_dict())], saved.nbytes, session


@pytest.mark.parametrize(
    ("transform", "moves", "name"),
    [
        *((transform, "weights and state", "llama") for transform in TRANSFORMS if transform != "none"),
        *((transform, "planned", "llama") for transform in TRANSFORMS if transform != "none"),
        *((transform, "activations", "t5") for transform in TRANSFORMS),
    ],
)
def test_what_moves_changes_no_bit_of_a_transform(transform, moves, name, tmp_path):
    chosen = TRANSFORMS[transform]
    expected, saved_bytes, _ = run(name, OffloadConfig(tier="none", **chosen))
    found, found_bytes, session = run(name, OffloadConfig(directory=tmp_path, min_bytes=0, **chosen, **MOVES[moves]))
    assert_same(found, expected)
    if moves == "activations":
        assert session.stats.total.offloaded_bytes > 0
    if moves == "weights and state":
        assert found_bytes == saved_bytes
        assert session.residency.store.tier.stats.written_bytes > 0
