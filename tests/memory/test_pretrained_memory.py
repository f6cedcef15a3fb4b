"""Models larger than what may be in memory are made, saved and loaded: counted by the allocator."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_offload import OffloadConfig, create_from_config, load_pretrained
from hf_offload.state.weights import weights_of
from tests.helpers.live_bytes import peak_bytes_in_use

LAYERS = 14
CONFIG = GPT2Config(
    n_layer=LAYERS, n_embd=512, n_head=8, vocab_size=4096, n_positions=64, bos_token_id=0, eos_token_id=0
)
TOTAL = LAYERS * 12 * 512 * 512 * 4


@pytest.fixture
def made(tmp_path):
    """A model whose weights are on the drive, and the settings."""
    config = OffloadConfig(tier="none", params="ssd", directory=tmp_path, memory_budget="40MiB")
    models = []
    peak = peak_bytes_in_use(lambda: models.append(create_from_config(GPT2LMHeadModel, CONFIG, config=config)))
    if peak is None:
        pytest.skip("the allocator does not tell what is in use")
    return models[0], config, peak


def test_random_weights_leave_as_they_are_drawn(made):
    model, _, peak = made
    residency = weights_of(model)
    assert residency.total_bytes > TOTAL
    assert peak < residency.budget_bytes + (32 << 20) < 0.5 * TOTAL


@pytest.mark.parametrize("size", ["50GB", "30MB"])
def test_a_model_is_saved_and_loaded_a_weight_at_a_time(made, size, tmp_path):
    model, config, _ = made
    room = weights_of(model).budget_bytes + (32 << 20)
    assert (
        peak_bytes_in_use(lambda: model.save_pretrained(tmp_path / "saved", max_shard_size=size)) < room < 0.5 * TOTAL
    )
    models = []
    # In another type, for values of the same type are those of the file that is mapped into memory.
    load = lambda: models.append(load_pretrained(GPT2LMHeadModel, tmp_path / "saved", config=config, dtype="float64"))  # noqa: E731
    assert peak_bytes_in_use(load) < 2 * room < TOTAL
    expected = model.get_parameter(f"transformer.h.{LAYERS - 1}.mlp.c_fc.weight")
    assert torch.equal(models[0].get_parameter(f"transformer.h.{LAYERS - 1}.mlp.c_fc.weight"), expected.double())


def test_a_state_dict_is_taken_and_loaded_a_weight_at_a_time(made):
    model, _, _ = made
    room = weights_of(model).budget_bytes + (32 << 20)
    states = []
    assert peak_bytes_in_use(lambda: states.append(model.state_dict())) < room
    name = "transformer.h.0.mlp.c_fc.weight"
    states[0][name] = torch.zeros_like(states[0][name])
    assert peak_bytes_in_use(lambda: model.load_state_dict(states[0])) < room < 0.5 * TOTAL
    assert not model.get_parameter(name).any()
    assert model.transformer.h[1].mlp.c_fc.weight.any()
