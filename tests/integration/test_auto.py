"""A budget instead of a policy: offload='auto' in real training steps."""

import contextlib
import functools
import logging
from types import SimpleNamespace

import pytest
import torch
import transformers

from hf_offload import OffloadConfig, attach, offload_activations
from hf_offload.errors import OffloadConfigError, OffloadPlanError
from hf_offload.plan.plan import Placement
from hf_offload.planning.measuring import StepMeter
from hf_offload.planning.step_time import StepClock
from tests.helpers.activation_heavy_models import TOKENS, batch, build
from tests.helpers.live_bytes import live_bytes_of_steps, peak_bytes_in_use
from tests.helpers.tables import rows
from tests.helpers.training_steps import end_step, training_steps

MIB = 1 << 20


@pytest.fixture(autouse=True)
def known_machine(machine_with_drive):
    """Plans do not depend on how busy the machine is."""
    machine_with_drive(1e9)


def model_of(name, dropout=0.1, layers=4):
    torch.manual_seed(0)
    return build(name, dropout, layers)


def train(model, config, steps=5, inputs=None, micro_batches=1):
    """Losses, final weights, and the last plan that was looked at with its forecast, or else the last one.

    On a busy machine a plan may be made anew at any step, and nothing has been measured of it when the run ends.
    """
    torch.manual_seed(1)
    losses = []
    forecast = plan = None

    def loss_of(step):
        return model(**(inputs[step % len(inputs)] if inputs else batch())).loss

    for session, of_step in training_steps(model, config, steps, loss_of, micro_batches=micro_batches):
        losses += of_step
        now = session.forecast
        if forecast is None or (now is not None and now.measured_peak_bytes is not None):
            forecast, plan = now, session.plan
    return losses, [parameter.detach().clone() for parameter in model.parameters()], forecast, plan


def measured_peak(model, config):
    """Live bytes of the first step that was looked at under a plan."""
    with contextlib.closing(training_steps(model, config, 12, lambda step: model(**batch()).loss)) as steps:
        for session, _ in steps:
            if session.forecast is not None and session.forecast.measured_peak_bytes is not None:
                return session.forecast.measured_peak_bytes
    raise AssertionError("no step was looked at")


@functools.cache
def in_memory(name, steps=5, micro_batches=1):
    """Losses and final weights of a run with all in memory."""
    return train(model_of(name), OffloadConfig(tier="none"), steps, micro_batches=micro_batches)[:2]


@functools.cache
def live_peaks(name, layers=4):
    """Bytes that are there all the time, and those of a step's peak with everything kept."""
    return live_bytes_of_steps(model_of(name, layers=layers), batch())


def auto(budget, tmp_path, **settings):
    return OffloadConfig(tier="auto", memory_budget=budget, directory=tmp_path, min_bytes=4096, **settings)


@pytest.mark.parametrize(
    ("name", "share"),
    rows(
        [("gpt2", 0.8), ("gpt2", 0.5), ("gpt2", 0.3), ("bert", 0.5), ("bert", 0.3), ("t5", 0.3), ("llama", 0.3)],
        quick=[("gpt2", 0.3), ("t5", 0.3)],
    ),
)
def test_a_budget_is_kept_and_nothing_changes(name, share, tmp_path):
    fixed, activations = live_peaks(name)
    budget = int(fixed + share * activations)
    expected = in_memory(name, 6)
    losses, weights, forecast, plan = train(model_of(name), auto(budget, tmp_path), 6)
    assert losses == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(weights, expected[1], strict=True))
    assert set(plan.placements.values()) != {Placement.KEEP}
    assert forecast.peak_bytes <= budget
    assert forecast.measured_peak_bytes <= 1.02 * budget


def test_state_and_weights_stay_where_activations_alone_make_room(tmp_path):
    fixed, activations = live_peaks("gpt2")
    model = model_of("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with offload_activations(model, auto(int(fixed + 0.4 * activations), tmp_path)) as session:
        session.prepare_optimizer(optimizer)
        for _ in range(3):
            model(**batch()).loss.backward()
            end_step(optimizer, session)
        assert set(session.plan.placements.values()) != {Placement.KEEP}
        assert not session.streams_optimizer
        assert session.residency is None


def test_a_run_that_fits_is_left_alone(tmp_path):
    _, _, forecast, plan = train(model_of("gpt2"), auto("1GiB", tmp_path))
    assert set(plan.placements.values()) == {Placement.KEEP}
    assert forecast.measured_peak_bytes == pytest.approx(forecast.peak_bytes, rel=0.02)


def test_the_allocator_sees_the_peak_that_was_measured(tmp_path):
    fixed, activations = live_peaks("gpt2", layers=8)
    budget = int(fixed + 0.5 * activations)
    model = model_of("gpt2", layers=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with offload_activations(model, auto(budget, tmp_path)) as session:

        def step():
            model(**batch()).loss.backward()
            end_step(optimizer, session)

        peaks = []
        for _ in range(60):
            known, plan = session.planned, session.plan
            peaks.append(peak_bytes_in_use(step))
            if session.planned is not known or session.plan is not plan:
                peaks.clear()  # what was measured is of another plan
            if len(peaks) == 4:
                break
        measured = known.prediction.measured_peak_bytes
    if None in peaks:
        pytest.skip("this machine's allocator does not tell what is in use")
    # It counts for the whole process: what former tests left and a step frees is missing in one peak.
    in_use = max(peaks)
    assert fixed + in_use <= 1.02 * budget
    assert fixed + in_use == pytest.approx(measured, rel=0.05)


def test_the_prediction_follows_the_pace_of_steps_that_nobody_looks_at(tmp_path, monkeypatch):
    honest = StepClock.stop

    def quick(clock):  # however busy the machine is: a pace above that of a measured step is not taken from one step
        times = honest(clock)
        return times and (times[0], times[1] / 100)

    monkeypatch.setattr(StepClock, "stop", quick)
    model = model_of("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with offload_activations(model, auto("1GiB", tmp_path)) as session:
        predicted, pace = [], []
        for _ in range(3):  # measured; under the plan; looked at
            model(**batch()).loss.backward()
            end_step(optimizer, session)
            predicted.append(session.forecast.step_s)
            pace.append(session.planned.pace)
        assert pace[1] < 1.0
        assert predicted[2] == pytest.approx(pace[1] * predicted[1])


def needing_more(monkeypatch, nbytes):
    """Let every measured peak look larger than it was."""
    for name in ("peak_bytes", "taken_bytes"):
        honest = getattr(StepMeter, name)
        monkeypatch.setattr(StepMeter, name, lambda meter, which, honest=honest: honest(meter, which) + nbytes)


def test_a_step_over_the_budget_is_planned_again_with_less(tmp_path, monkeypatch, caplog):
    fixed, activations = live_peaks("gpt2", layers=8)
    needing_more(monkeypatch, activations // 4)  # more than a plan leaves free for a drive that falls behind
    with caplog.at_level(logging.INFO, "hf_offload"):
        _, _, forecast, _ = train(model_of("gpt2", layers=8), auto(int(fixed + 0.6 * activations), tmp_path), 10)
    messages = [record.getMessage() for record in caplog.records]
    assert any("more than the budget: planning again" in message for message in messages)
    assert any(message.startswith("Corrected plan for") for message in messages)
    assert forecast.measured_peak_bytes is None or forecast.measured_peak_bytes <= 1.02 * (fixed + 0.6 * activations)


def test_where_nothing_needs_less_the_training_goes_on_with_a_warning(tmp_path, monkeypatch, caplog):
    fixed, activations = live_peaks("gpt2")
    needing_more(monkeypatch, 2 * activations)
    expected = in_memory("gpt2")
    found = train(model_of("gpt2"), auto(int(fixed + 0.6 * activations), tmp_path))
    assert found[0] == expected[0]
    assert sum(record.getMessage().startswith("A step took") for record in caplog.records) == 1


def test_too_small_a_budget_is_refused_with_the_smallest_that_does(tmp_path):
    fixed, activations = live_peaks("gpt2")
    with pytest.raises(OffloadPlanError, match=r"too small: the least .* What would lower it") as refused:
        train(model_of("gpt2"), auto(int(fixed + 0.02 * activations), tmp_path))
    assert "batch" in str(refused.value)


def test_a_budget_that_needs_it_has_mlps_cut(tmp_path, caplog):
    def model():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, use_cache=False, bos_token_id=1, eos_token_id=1,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).train()

    cut = {"tiled_mlp": "auto", "tile_bytes": "1MiB"}
    with pytest.raises(OffloadPlanError) as refused:
        train(model(), auto("1MiB", tmp_path, **cut))
    budget = int(1.05 * refused.value.smallest_bytes)
    with pytest.raises(OffloadPlanError):
        train(model(), auto(budget, tmp_path))
    with caplog.at_level(logging.INFO, "hf_offload"):
        losses, _, forecast, _ = train(model(), auto(budget, tmp_path, **cut))
    assert "modules are computed a few tokens at a time" in caplog.text
    assert forecast.measured_peak_bytes <= 1.02 * budget
    assert losses == pytest.approx(train(model(), OffloadConfig(tier="none"))[0], rel=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_smallest_budget_that_is_named_is_the_smallest_that_runs(name, tmp_path):
    with pytest.raises(OffloadPlanError) as refused:
        train(model_of(name), auto("1MiB", tmp_path))
    smallest = refused.value.smallest_bytes
    assert smallest % MIB == 0
    measured = measured_peak(model_of(name), auto(smallest, tmp_path))
    # Some of a budget stays free, and it is rounded up.
    assert 0.9 * (smallest - MIB) < measured <= smallest
    with pytest.raises(OffloadPlanError):
        train(model_of(name), auto(smallest - 2 * MIB, tmp_path))


def new_plans(caplog):
    """How many plans were made of a measured step."""
    return sum(record.getMessage().startswith("Plan for") for record in caplog.records)


@pytest.fixture
def no_overhead(monkeypatch):
    """All seconds of a clock are compute."""
    monkeypatch.setattr("hf_offload.planning.step_time.Overhead.seconds", lambda overhead: 0.0)


class SlowClock(StepClock):
    """By which each step takes longer than all before it."""

    _slower = 1e6

    def stop(self):
        timed = super().stop()
        self._slower *= 2
        return timed and tuple(self._slower * seconds for seconds in timed)


@pytest.mark.parametrize(("steps", "corrected"), [(4, 0), (20, 2)])
def test_a_prediction_is_corrected_after_three_steps_and_then_ever_more_rarely(
    steps, corrected, tmp_path, caplog, monkeypatch, no_overhead
):
    monkeypatch.setattr("hf_offload.planning.automatic.StepClock", SlowClock)
    fixed, activations = live_peaks("gpt2")
    with caplog.at_level(logging.INFO, "hf_offload"):
        # A trial of recompute would be another plan, where the compute of this machine is as slow as its drive.
        config = auto(int(fixed + 0.5 * activations), tmp_path, recompute_elementwise="off")
        _, _, forecast, _ = train(model_of("gpt2"), config, steps)
    # The third step after the plan has been looked at, and the sixth after that one.
    assert sum(record.getMessage().startswith("Steps take") for record in caplog.records) == corrected
    # A single slow step does not correct what was measured.
    assert (forecast.step_s > 1e6) == (corrected > 0)
    assert new_plans(caplog) == 1


class GivenClock:
    """By which forwards of ``model`` take these seconds, and nothing else does, whoever asks for the time."""

    def __init__(self, model, seconds):
        self._seconds = iter(seconds)
        self._now_s = 1e6
        model.register_forward_hook(self._pass)

    def _pass(self, *_):
        self._now_s += next(self._seconds)

    def perf_counter(self):
        return self._now_s


def test_the_clock_of_a_step_stops_with_the_optimizer(monkeypatch):
    """Evaluation, saving and what else comes before the step is said to have ended are no part of its time."""
    readings = iter([2e6, 4e6])
    monkeypatch.setattr("hf_offload.planning.step_time.time", SimpleNamespace(perf_counter=lambda: next(readings)))
    waited_s = iter([1.0, 2.0])
    clock = StepClock(lambda: next(waited_s))
    assert clock.start()
    clock.mark_end()
    assert clock.stop() == (2e6, 2e6 - 1)
    assert clock.stop() is None


def test_a_run_of_slow_steps_does_not_stay_the_prediction(tmp_path, monkeypatch, no_overhead):
    slow, usual = [1000.0] * 3, [1.0] * 6
    model = model_of("gpt2")
    monkeypatch.setattr("hf_offload.planning.step_time.time", GivenClock(model, [1.0] * 3 + slow + usual))
    _, _, forecast, _ = train(model, auto("1GiB", tmp_path), 12)
    assert forecast.step_s == pytest.approx(1.0)
    assert forecast.measured_step_s == slow + usual


def test_no_peak_is_predicted_below_one_that_was_measured(tmp_path, monkeypatch):
    needing_more(monkeypatch, MIB)
    _, _, forecast, _ = train(model_of("gpt2"), auto("1GiB", tmp_path), 3)
    assert forecast.peak_bytes == forecast.measured_peak_bytes


def test_a_smaller_batch_runs_under_the_plan_it_fits_into_until_it_stays(tmp_path, caplog):
    fixed, activations = live_peaks("gpt2")
    long = batch()
    short = {name: value[:, : TOKENS // 4].contiguous() for name, value in long.items()}
    inputs = [long, short, long, long, short, short, short, short, long]
    expected = train(model_of("gpt2"), OffloadConfig(tier="none"), len(inputs), inputs)
    with caplog.at_level(logging.INFO, "hf_offload"):
        found = train(model_of("gpt2"), auto(int(fixed + 0.5 * activations), tmp_path), len(inputs), inputs)
    assert found[0] == expected[0]
    assert new_plans(caplog) == 2  # of the long one at once, of the short one when it came the third time in a row
    assert Placement.SSD in found[3].placements.values()  # the last batch was a long one


def test_a_larger_batch_is_measured_at_once(tmp_path, caplog):
    fixed, activations = live_peaks("gpt2")
    long = batch()
    short = {name: value[:, : TOKENS // 4].contiguous() for name, value in long.items()}
    with caplog.at_level(logging.INFO, "hf_offload"):
        config = auto(int(fixed + 0.5 * activations), tmp_path, recompute_elementwise="off")
        found = train(model_of("gpt2"), config, 10, [short] + 9 * [long])
    assert new_plans(caplog) == 2
    assert found[2].measured_peak_bytes <= 1.02 * int(fixed + 0.5 * activations)


def test_steps_that_nobody_ends_are_told_apart_by_the_optimizer(tmp_path):
    model = model_of("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with offload_activations(model, auto("1GiB", tmp_path)) as session:
        for _ in range(2):
            model(**batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.forecast is not None


def test_an_exception_in_the_measured_step_leaves_nothing_behind(tmp_path):
    model = model_of("gpt2")
    with pytest.raises(ZeroDivisionError), offload_activations(model, auto("1GiB", tmp_path)):
        model(**batch()).loss.backward()
        raise ZeroDivisionError
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_gradients_that_are_there_already_count(tmp_path):
    fixed, activations = live_peaks("gpt2")
    expected = in_memory("gpt2", 6, micro_batches=2)
    found = train(model_of("gpt2"), auto(int(fixed + 0.7 * activations), tmp_path), 6, micro_batches=2)
    assert found[0] == expected[0]
    assert found[2].measured_peak_bytes <= 1.02 * int(fixed + 0.7 * activations)


def test_on_a_drive_that_turns_out_slow_blocks_are_recomputed_exactly_and_put_back(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hf_offload.engine.hooks.Engine.bandwidth", lambda engine: {"ssd": (1e6, 1e6)}
    )  # reached, of 1e9 expected
    fixed, activations = live_peaks("gpt2")
    expected = in_memory("gpt2")
    model = model_of("gpt2")
    config = auto(int(fixed + 0.6 * activations), tmp_path, recompute_elementwise="off")
    losses, weights, _, plan = train(model, config)
    assert any(placement.recomputes for placement in plan.placements.values())
    assert losses == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(weights, expected[1], strict=True))
    assert not any(block.gradient_checkpointing for block in model.transformer.h)
    assert not any("_gradient_checkpointing_func" in vars(block) for block in model.transformer.h)


def test_what_cannot_go_with_a_budget_is_refused(tmp_path):
    with pytest.raises(OffloadConfigError, match="memory_budget is given, but tier='ssd'"):
        OffloadConfig(tier="ssd", memory_budget="1GiB")
    with pytest.raises(OffloadConfigError, match="keep_last_count"):
        OffloadConfig(tier="auto", keep_last_count=1)
    model = model_of("gpt2")
    model._compiled_call_impl = model.forward  # what compile() sets
    with pytest.raises(OffloadConfigError, match=r"torch\.compile"):
        attach(model, auto("1GiB", tmp_path))
