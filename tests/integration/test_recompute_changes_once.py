"""What changes once behind a block, as the kind of a loss in a shared config, does not keep it from being recomputed."""

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload import OffloadConfig
from hf_offload.errors import OffloadPlanError
from tests.helpers.live_bytes import peak_live_bytes
from tests.helpers.training_steps import training_steps

WIDTH, ROWS, LENGTH, STEPS = 32, 8, 32, 5
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
SIZES = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 2}
WORDS = {"vocab_size": 50, "max_position_embeddings": LENGTH}


@pytest.fixture(autouse=True)
def machine_that_recomputes(machine_with_drive, short_search):
    """A drive so slow that recomputing is always the better way."""
    machine_with_drive(1e6)


def words(seed):
    ids = torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": torch.arange(ROWS) % 2}


def images(seed):
    pixels = torch.randn(ROWS, 3, 24, 24, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "labels": torch.arange(ROWS) % 2}


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **WORDS, **DROPOUT))


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**SIZES, **DROPOUT, image_size=24, patch_size=4)
    )


def distilbert():
    config = transformers.DistilBertConfig(**WORDS, dim=WIDTH, hidden_dim=4 * WIDTH, n_layers=4, n_heads=2)
    return transformers.DistilBertForSequenceClassification(config)


MODELS = {"bert": (bert, words), "vit": (vit, images), "distilbert": (distilbert, words)}


class Shared:
    """A config that blocks share."""

    scale = 1.0


class Block(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.config.scale * self.down(nn.functional.gelu(self.up(hidden)))


class ChangesConfig(nn.Module):
    """Writes into the config that its blocks share, behind them: in each of its forwards, or in the first few."""

    def __init__(self, changes):
        super().__init__()
        self.config = Shared()
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(4))
        self.left = changes

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        if self.left:
            self.left -= 1
            self.config.scale = self.config.scale / 2
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=hidden.square().mean())


def rows(seed):
    return {"hidden": torch.randn(ROWS * LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))}


def train(make, batch, config=None):
    """Losses and weights; which blocks have been recomputed, and why others of the last plan cannot be."""
    torch.manual_seed(0)
    model = make().train()
    losses, recomputed, reasons = [], set(), []
    config = config or OffloadConfig(tier="none")
    steps = training_steps(model, config, STEPS, lambda step: model(**batch(step)).loss, learning_rate=1e-2)
    for session, of_step in steps:
        losses += of_step
        recomputed |= {name for name, one in session.plan.placements.items() if one.recomputes}
        if session.planned is not None:
            reasons = [span.not_twice for span in session.planned.footprint.blocks]
    return (losses, [parameter.tolist() for parameter in model.parameters()]), recomputed, reasons


def auto(make, batch, folder, share=0.75, **settings):
    """A budget for weights and state, and a ``share`` of the activations."""
    model = make().train()
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    activations = peak_live_bytes(lambda: model(**batch(0)).loss.backward())
    return OffloadConfig(
        tier="auto",
        memory_budget=int(3 * weights + share * activations),
        directory=folder,
        min_bytes=1024,
        recompute_elementwise="off",  # it takes steps of its own to be measured
        params="none",
        optimizer="none",
        **settings,
    )


@pytest.mark.parametrize("written", [0, None], ids=["refused at first", "moved at first"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_a_classifier_are_recomputed_though_its_first_loss_changes_their_config(tmp_path, name, written):
    make, batch = MODELS[name]
    found, recomputed, reasons = train(make, batch, auto(make, batch, tmp_path, max_step_write_bytes=written))
    assert recomputed
    assert reasons == [""] * 4
    assert found == train(make, batch)[0]


def test_so_are_blocks_whose_config_one_step_changes_in_a_way_that_counts(tmp_path):
    def make():
        return ChangesConfig(1)

    found, recomputed, reasons = train(make, rows, auto(make, rows, tmp_path))
    assert recomputed
    assert reasons == [""] * 4
    assert found == train(make, rows)[0]


def test_blocks_whose_config_every_step_changes_are_never_recomputed(tmp_path):
    def make():
        return ChangesConfig(STEPS)

    found, recomputed, reasons = train(make, rows, auto(make, rows, tmp_path))
    assert not recomputed
    assert all("config" in reason for reason in reasons)
    assert found == train(make, rows)[0]


def test_a_budget_that_needs_them_to_be_is_refused_in_the_second_step(tmp_path):
    def make():
        return ChangesConfig(STEPS)

    with pytest.raises(OffloadPlanError, match=r"cannot be done because config is another one, or has changed"):
        train(make, rows, auto(make, rows, tmp_path, max_step_write_bytes=0))
