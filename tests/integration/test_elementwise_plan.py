"""Recompute of elementwise operations in the plan of a running training: bits, and bytes that were predicted."""

import logging

import pytest
import torch

from hf_offload import OffloadConfig, offload_activations
from hf_offload.errors import OffloadPlanError
from hf_offload.structure.units import find_blocks
from tests.helpers.activation_heavy_models import batch, build
from tests.helpers.live_bytes import live_bytes_of_steps
from tests.helpers.train import assert_same, copied
from tests.helpers.training_steps import end_step

LAYERS = 4


@pytest.fixture(autouse=True)
def slow_machine(machine_with_drive):
    """Whatever leaves memory is waited for, and takes longer to come back than any operation takes to run again."""
    machine_with_drive(2e7)


def model_of(name, recomputable=False):
    torch.manual_seed(0)
    model = build(name, 0.1, layers=LAYERS)
    for block in () if recomputable else find_blocks(model).values():
        norm = next(module for module in block.modules() if "Norm" in type(module).__name__)
        block.register_buffer("calls", torch.zeros(()), persistent=False)
        # A block that writes to a buffer cannot be recomputed as a whole.
        norm.register_forward_pre_hook(lambda module, inputs, calls=block.calls: calls.add_(1) and None)
    return model


def train(model, config, steps, forwards=lambda step: 1):
    """Losses, gradients of the last step, weights, and the plan with the last forecast that was looked at."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, looked_at = [], None
    with offload_activations(model, config) as session:
        for step in range(steps):
            loss = sum(model(**batch()).loss for _ in range(forwards(step)))
            loss.backward()
            losses.append(loss.item())
            gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
            del loss
            end_step(optimizer, session)
            if session.forecast is not None and session.forecast.measured_peak_bytes is not None:
                looked_at = session.forecast
        plan = session.plan
        names = session.rematerialized
    return [losses, gradients, copied(list(model.parameters()))], (plan, looked_at, names)


def auto(budget, directory, **settings):
    return OffloadConfig(tier="auto", memory_budget=budget, directory=directory, min_bytes=4096, **settings)


def planned(name, share, directory, steps=4, forwards=lambda step: 1, recomputable=False, **settings):
    """What :func:`train` says of a run whose budget has room for this share of the activations, and that budget. A run of
    more than four steps has the bits of the one in memory.
    """
    fixed, activations = live_bytes_of_steps(model_of(name, recomputable), batch())
    budget = int(fixed + share * activations)
    model = model_of(name, recomputable)
    bits, found = train(model, auto(budget, directory, **settings), steps, forwards)
    assert not any("forward" in vars(module) for module in model.modules())
    if steps > 4:
        assert_same(bits, train(model_of(name, recomputable), OffloadConfig(tier="none"), steps, forwards)[0])
    return *found, budget


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_plan_chooses_it_and_no_bit_changes(name, tmp_path):
    plan, forecast, names, budget = planned(name, 0.85, tmp_path, steps=9)
    assert plan.elementwise
    assert names
    assert forecast.peak_bytes <= budget
    assert forecast.measured_peak_bytes == pytest.approx(forecast.peak_bytes, rel=0.02)


def test_no_step_is_measured_for_it_that_could_break_the_budget(tmp_path):
    def most_of_any_step(budget):
        torch.manual_seed(0)
        model = build("gpt2", 0.1, layers=LAYERS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with offload_activations(model, auto(budget, tmp_path)) as session:
            for _ in range(4):  # in the last, blocks would recompute more than there is room for
                model(**batch()).loss.backward()
                end_step(optimizer, session)
            return session.most_measured_bytes

    with pytest.raises(OffloadPlanError) as refused:
        most_of_any_step("1MiB")
    budget = int(1.1 * refused.value.smallest_bytes)
    assert most_of_any_step(budget) <= budget


@pytest.mark.parametrize(("bytes_per_s", "is_on"), [(2e9, True), (3e9, False)])
def test_a_rule_says_on_which_machines_it_is_on(bytes_per_s, is_on, machine_with_drive, tmp_path, caplog):
    """Memory of 10 GB/s is four times as fast as a drive of 2 GB/s, and not as one of 3 GB/s."""
    machine_with_drive(bytes_per_s)
    with caplog.at_level(logging.INFO, "hf_offload"):
        plan, _, names, _ = planned("gpt2", 0.5, tmp_path)
    measured = [one for one in caplog.messages if "Elementwise operations are recomputed" in one]
    assert len(measured) == is_on
    assert any(one.tier for one in plan.placements.values())
    assert plan.elementwise == bool(names) == is_on


def test_a_run_that_fits_computes_nothing_twice(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "hf_offload"):
        plan, _, names, _ = planned("gpt2", 1.5, tmp_path)
    assert not plan.elementwise
    assert not names
    assert "elementwise" not in caplog.text


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_blocks_that_are_recomputed_as_a_whole_do_it_within_that(name, tmp_path):
    """What a block's recompute saves is what its forward would have saved otherwise."""
    plan, forecast, _, budget = planned(name, 0.45, tmp_path, steps=7, recomputable=True)
    assert plan.elementwise
    assert any(one.recomputes for one in plan.placements.values())
    # Plans expect more of blocks that are recomputed.
    assert forecast.measured_peak_bytes <= min(1.03 * forecast.peak_bytes, budget)
    assert forecast.measured_peak_bytes >= 0.8 * forecast.peak_bytes  # T5's is 0.83


def test_a_step_that_goes_on_as_another_one_is_planned_as_it_was_measured(tmp_path):
    """The second step begins as the one that is to be measured with it, and has another forward."""

    def forwards(step):
        return 1 if step == 0 else 2

    plan, forecast, *_ = planned("gpt2", 0.9, tmp_path, 7, forwards)
    assert plan.elementwise
    assert forecast.measured_peak_bytes == pytest.approx(forecast.peak_bytes, rel=0.1)


@pytest.mark.parametrize("setting", ["norms", "off"])
def test_what_the_user_has_set_is_kept(setting, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        plan, _, names, _ = planned("gpt2", 0.85, tmp_path, recompute_elementwise=setting)
    assert not plan.elementwise
    assert ("transformer.h.0.ln_1" in names) == (setting == "norms")
    assert "Elementwise operations are recomputed" not in caplog.text
