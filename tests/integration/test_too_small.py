"""What the error of a budget that is too small advises: what may help this model with these settings, and nothing else."""

import logging
import re

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_offload import OffloadConfig, attach, offload_activations
from hf_offload.errors import OffloadPlanError
from hf_offload.settings.sizes import format_bytes
from tests.helpers.training_steps import end_step


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, hidden):
        return hidden + self.b(nn.functional.gelu(self.a(hidden)))


class Custom(nn.Module):
    """Blocks that no plan knows as such, and no vocabulary, but a method of the name that models of transformers have."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def get_output_embeddings(self, layer):
        return self.blocks[layer]

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def gpt2():
    sizes = {"vocab_size": 2048, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))


def words(rows=8):
    ids = torch.randint(0, 2048, (rows, 64), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def refusal_of(folder, model, inputs, **settings):
    optimizer = torch.optim.AdamW(model.train().parameters())
    session = attach(model, OffloadConfig(tier="auto", memory_budget="64KiB", directory=folder, **settings))
    optimizer = session.prepare_optimizer(optimizer)
    try:
        with pytest.raises(OffloadPlanError, match="too small") as refused:
            for _ in range(4):
                found = model(**inputs)
                (found if isinstance(found, torch.Tensor) else found.loss).backward()
                end_step(optimizer, session)
    finally:
        session.detach()
    return str(refused.value)


@pytest.fixture(autouse=True)
def machine(machine_with_drive):
    machine_with_drive(1e9)


IN_MEMORY = {"params": "none", "optimizer": "none"}


def test_blocks_that_cannot_be_recomputed_for_want_of_a_class_are_named_with_it(tmp_path):
    text = refusal_of(tmp_path, Custom(), {"hidden": torch.randn(2048, 32)}, min_bytes=1024, **IN_MEMORY)
    assert "transformers.modeling_layers.GradientCheckpointingLayer, or are named in recompute_blocks" in text
    assert "vocabulary" not in text
    assert "tiled_loss" not in text


def test_a_head_over_a_vocabulary_is_named_and_tiled_unless_it_is(tmp_path):
    text = refusal_of(tmp_path, gpt2(), words(), min_bytes=1024, max_step_write_bytes=0, **IN_MEMORY)
    assert "a smaller vocabulary, or tiled_loss='on'" in text
    assert "GradientCheckpointingLayer" not in text
    tiled = refusal_of(
        tmp_path,
        gpt2(),
        words(),
        min_bytes=1024,
        max_step_write_bytes=0,
        tiled_loss="on",
        tile_bytes="1MiB",
        **IN_MEMORY,
    )
    assert "tiled_loss" not in tiled


def test_weights_that_may_leave_are_not_said_to_stay_and_a_head_that_takes_most_comes_first(tmp_path):
    text = refusal_of(tmp_path, gpt2(), words(), min_bytes=1024)
    assert "cannot leave memory here" not in text
    assert "What would lower it: the peak is in GPT2LMHeadModel, outside of the blocks" in text
    followed = refusal_of(tmp_path, gpt2(), words(), min_bytes=1024, tiled_loss="on", tile_bytes="1MiB")
    least = [int(re.search(r"can do with is (\d+) MiB", one)[1]) for one in (text, followed)]
    assert least[1] < least[0]


def test_what_min_bytes_keeps_is_named_where_it_is_much_and_what_is_followed_is_not(tmp_path):
    text = refusal_of(tmp_path, gpt2(), words(2), params="ssd", optimizer="ssd", min_bytes="64MiB")
    assert "a lower min_bytes: " in text
    assert "of saved tensors and " in text
    assert "of weights with their gradients and state stay in memory, being smaller than 64.00 MiB" in text
    assert "state on a tier" not in text
    low = refusal_of(tmp_path, gpt2(), words(), min_bytes=0, **IN_MEMORY)
    assert "min_bytes" not in low


def test_state_on_a_tier_is_advised_where_settings_keep_it_in_memory(tmp_path):
    model = nn.Sequential(nn.Linear(512, 512))
    model.forward = lambda hidden: model[0](hidden).square().mean()
    assert "state on a tier (optimizer='ssd'" in refusal_of(
        tmp_path, model, {"hidden": torch.ones(1, 512)}, **IN_MEMORY
    )


def first_steps(folder, caplog, model, rows, budget, count=1, **settings):
    """The session of a few steps of which the first is the largest, and what is said."""
    config = OffloadConfig(tier="auto", memory_budget=budget, directory=folder, **{"min_bytes": 1024, **settings})
    with offload_activations(model, config) as session, caplog.at_level(logging.WARNING, "hf_offload"):
        optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters()))
        try:
            for _ in range(count):
                model(rows).backward()
                end_step(optimizer, session)
        except OffloadPlanError as error:
            return session, [str(error)]
    # What is said of the allocator is said once in a process.
    return session, [record.getMessage() for record in caplog.records if record.name != "hf_offload.allocator"]


def test_a_first_step_reads_no_more_ahead_than_a_small_budget_has_room_for(tmp_path, caplog):
    session, said = first_steps(tmp_path, caplog, Custom(), torch.randn(2048, 32), 6 << 20, **IN_MEMORY)
    assert session.most_measured_bytes <= 6 << 20, said


class Wide(nn.Module):
    """Weights, gradients and state take as much as activations."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return hidden.square().mean()


def test_a_first_step_over_the_budget_is_said_with_what_it_took(tmp_path, caplog):
    """State fits before activations are known, and leaves memory once they are."""
    budget = 28 << 20
    session, said = first_steps(tmp_path, caplog, Wide(), torch.randn(1600, 512), budget, count=4)
    taken = session.most_measured_bytes
    assert len(said) == 1
    assert said[0].startswith(
        f"The first step of its kind took {format_bytes(taken)}, {format_bytes(taken - budget)} more"
    )
    assert session.forecast.measured_peak_bytes <= budget


def test_a_refusal_says_what_a_step_over_the_budget_took(tmp_path, caplog):
    session, said = first_steps(tmp_path, caplog, Custom(), torch.randn(2048, 32), 3 << 20, **IN_MEMORY)
    assert session.most_measured_bytes > 3 << 20
    assert said[0].endswith(f"The step that was measured took {format_bytes(session.most_measured_bytes)}.")


class Scan(GradientCheckpointingLayer):
    """A recurrent layer: what it saves of each step is small, and much together."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(128, 128)

    def forward(self, hidden):
        state, rows = torch.zeros_like(hidden[:, 0]), []
        for row in self.gate(hidden).unbind(1):
            state = torch.tanh(state + row)
            rows.append(state)
        return hidden + torch.stack(rows, 1)


class Scans(nn.Module):
    supports_gradient_checkpointing = True

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scan() for _ in range(6))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def test_recompute_drops_what_is_too_small_to_move(tmp_path, caplog):
    rows = torch.randn(64, 32, 128)  # 1 MiB, of which each step saves a part of 32 KiB
    settings = {"min_bytes": 64 << 10, **IN_MEMORY}
    refused, (text,) = first_steps(tmp_path, caplog, Scans(), rows, 1 << 20, **settings)
    least = int(re.search(r"can do with is (\d+) MiB", text)[1]) << 20
    assert least <= refused.most_measured_bytes - 2 * rows.nbytes  # which had those of all six blocks
    session, _ = first_steps(tmp_path, caplog, Scans(), rows, least, count=4, **settings)
    assert session.forecast.measured_peak_bytes <= least
    _, (text,) = first_steps(tmp_path, caplog, Scans(), rows, int(0.8 * least), **settings)
    assert "too small" in text


def test_only_the_first_plan_ends_a_run(tmp_path, caplog):
    """The budget that a refusal names is for batches like the first. A longer one has a warning, and the run goes on."""

    def run(lengths, budget=None):
        torch.manual_seed(0)
        model = Custom()
        optimizer = torch.optim.AdamW(model.parameters())
        config = OffloadConfig(tier="auto", memory_budget=budget, directory=tmp_path, min_bytes=1024)
        with offload_activations(model, config if budget else OffloadConfig(tier="none")) as session:
            session.prepare_optimizer(optimizer)
            for length in lengths:
                rows = torch.randn(length, 32, generator=torch.Generator().manual_seed(length))
                model(rows).backward()
                end_step(optimizer, session)
        return [parameter.detach().clone() for parameter in model.parameters()], session

    lengths = [4096, 2048, 8192, 8192, 4096, 8192, 12288]
    with pytest.raises(
        OffloadPlanError, match="for batches with inputs of 4096 x 32: larger ones need more"
    ) as refused:
        run(lengths, 1 << 20)
    expected, _ = run(lengths)
    caplog.clear()
    found, session = run(lengths, refused.value.smallest_bytes)
    assert all(map(torch.equal, found, expected))
    assert len(session.stats.steps) == len(lengths)
    (said,) = [record.getMessage() for record in caplog.records if "do not fit the budget" in record.getMessage()]
    assert said.startswith("Batches with inputs of 8192 x 32 do not fit the budget")
    assert f"A memory budget of {format_bytes(refused.value.smallest_bytes)} is too small" in said
    assert re.search(r"the least this run can do with is \d+ MiB, [\d.]+ MiB more", said)
    assert not [one for one in caplog.messages if one.startswith("A step took")]


def test_a_step_that_is_the_last_needs_no_plan(tmp_path, caplog):
    model = Custom()
    config = OffloadConfig(tier="auto", memory_budget="64KiB", directory=tmp_path, min_bytes=1024, **IN_MEMORY)
    session = attach(model, config)
    model(torch.randn(2048, 32)).backward()
    session.optimizer_stepped()
    with caplog.at_level(logging.WARNING, "hf_offload"):
        session.finish()
    session.detach()
    assert "too small" in caplog.text
