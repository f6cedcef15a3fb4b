"""A budget that weights, gradients and optimizer state do not fit into: tier='auto' moves them, too, and only then."""

import functools
import logging
import time
from types import SimpleNamespace

import pytest
import torch
import transformers

from hf_offload import OffloadConfig, attach
from hf_offload.engine.hooks import Engine
from hf_offload.errors import OffloadPlanError
from hf_offload.planning.automatic import AutomaticPlan
from hf_offload.state import step
from hf_offload.state.optimizer import streaming_of
from hf_offload.state.registry import parked_of
from hf_offload.state.shadow import Shadow
from hf_offload.state.step import Streaming
from hf_offload.state.units import Units
from hf_offload.state.update import UpdateComputer
from hf_offload.storage import disk_io
from hf_offload.storage.handling import WAITS
from hf_offload.storage.service import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATE, WEIGHTS, storage_of
from hf_offload.storage.tier import Tier
from tests.helpers.tables import rows
from tests.helpers.train import copied, take_steps
from tests.helpers.trainers import make_trainer
from tests.helpers.training_steps import end_step, weight_bytes

VOCABULARY, TOKENS, LAYERS = 256, 16, 8

CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=LAYERS, n_head=2, n_positions=TOKENS, use_cache=False,
        bos_token_id=1, eos_token_id=1,
    ),
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=TOKENS, use_cache=False, bos_token_id=1, eos_token_id=1,
    ),
    "bert": lambda: transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=2,
        max_position_embeddings=TOKENS,
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_ff=256, d_kv=32, num_layers=LAYERS // 2, num_decoder_layers=LAYERS // 2,
        num_heads=2, decoder_start_token_id=0, use_cache=False,
    ),
}  # fmt: skip
FUSED = functools.partial(torch.optim.AdamW, fused=True)  # whose step needs no memory for itself
CLASSES = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}


@pytest.fixture(autouse=True)
def known_machine(machine_with_drive):
    """Plans do not depend on how busy the machine is."""
    machine_with_drive(1e9)


def build(name="gpt2"):
    torch.manual_seed(0)
    return CLASSES.get(name, transformers.AutoModelForCausalLM).from_config(CONFIGS[name]()).train()


def batch(number):
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens.clone()}


def share_staying(model, optimizer):
    """Of the weights that are large enough, how much has its gradients and state in memory."""
    streaming, large = streaming_of(optimizer), [p for p in model.parameters() if p.nbytes >= 1024]
    staying = [p for p in large if streaming is None or not streaming.moves(p)]
    return sum(p.nbytes for p in staying) / sum(p.nbytes for p in large)


class Trained:
    """Eight steps, of which two are measured before the first plan: losses, weights, measured peaks, and where all was."""

    def __init__(
        self, name, folder, budget=None, steps=8, prepare=True, optimizer=torch.optim.AdamW, batch=batch, **settings
    ):
        model = build(name)
        made = optimizer(model.parameters(), lr=1e-3)
        given = (
            {"tier": "none"} if budget is None else {"memory_budget": budget, "directory": folder, "min_bytes": 1024}
        )
        session = attach(model, OffloadConfig(**given, **settings))
        if prepare:
            assert session.prepare_optimizer(made) is made
        torch.manual_seed(1)
        self.losses, self.peaks, self.shares_staying = [], [], []
        for number in range(steps):
            with session.scope():
                loss = model(**batch(number)).loss
                loss.backward()
            self.losses.append(loss.item())
            del loss
            self.shares_staying.append(share_staying(model, made))
            session.clip_grad_norm_(1.0)
            end_step(made, session)
            if session.forecast is not None and session.forecast.measured_peak_bytes is not None:
                self.peaks.append(session.forecast.measured_peak_bytes)
        self.streams, weights = streaming_of(made) is not None, session.residency
        self.parks = weights is not None and weights.limit_bytes < weights.total_bytes
        self.most_measured_bytes = session.most_measured_bytes
        self.step_share = None if session.planned is None else session.planned.footprint.step_share
        self.window_bytes = streaming_of(made).state_store.window_bytes if self.streams else None
        self.predicted = None if session.forecast is None else session.forecast.peak_bytes
        session.detach()
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]

    def is_same(self, other):
        return self.losses == other.losses and all(map(torch.equal, self.weights, other.weights))


@pytest.mark.parametrize(
    ("name", "share", "moved"),
    rows(
        [
            *((name, 0.5, "state") for name in CONFIGS),
            *((name, 0.2, "weights") for name in CONFIGS),
        ],
        quick=[("t5", 0.5, "state"), ("llama", 0.2, "weights")],
    ),
)
def test_what_does_not_fit_leaves_memory_and_nothing_changes(name, share, moved, tmp_path):
    kept = Trained(name, tmp_path, "1GiB")
    assert not kept.streams
    assert not kept.parks
    budget = int(share * kept.peaks[-1])
    found = Trained(name, tmp_path, budget)
    assert found.is_same(kept)
    assert found.streams
    assert found.parks == (moved == "weights")
    assert found.peaks[-1] <= budget


@pytest.mark.parametrize("weights", ["auto", "none"])
@pytest.mark.parametrize("name", rows(list(CONFIGS), quick=["gpt2", "t5"]))
def test_of_gradients_and_state_as_much_stays_as_the_budget_leaves_room_for(name, weights, tmp_path):
    kept = Trained(name, tmp_path, "1GiB")
    shares = []
    for share in (0.9, 0.7):
        budget = int(share * kept.peaks[-1])
        found = Trained(name, tmp_path, budget, params=weights)
        assert found.is_same(kept)
        assert found.peaks[-1] <= budget
        assert not found.parks
        assert found.window_bytes == (1 if found.shares_staying[-1] >= 0.5 else 2) * budget // 32
        assert found.step_share == 2 * max(each.nbytes for each in kept.weights) / sum(
            each.nbytes for each in kept.weights
        )
        shares.append(found.shares_staying[-1])
    assert 1 > shares[0] > shares[1] > 0


def test_on_a_slow_drive_gradients_and_state_take_no_more_of_their_windows_than_plans_count_on(tmp_path, monkeypatch):
    budget = int(0.7 * Trained("gpt2", tmp_path, "1GiB").peaks[-1])
    write_once = disk_io.write_once

    def slowly(*arguments):
        time.sleep(0.02)
        return write_once(*arguments)

    monkeypatch.setattr(disk_io, "write_once", slowly)
    model = build()
    session = attach(model, OffloadConfig(memory_budget=budget, directory=tmp_path, min_bytes=1024, params="none"))
    optimizer = session.prepare_optimizer(FUSED(model.parameters(), lr=1e-3))
    taken = []
    for number in range(8):
        loss = model(**batch(number)).loss
        if number >= 5:
            step, streaming = session.planned.problem.footprint, streaming_of(optimizer)
            at = next(index for index, one in enumerate(step.segments) if one.backward)
            most = sum(step.transfer_windows.values()) - int(step.idle_bytes[at])
            taken.append(streaming.state_store.buffer_bytes + streaming.gradient_store.buffer_bytes)
            assert taken[-1] <= most < sum(step.transfer_windows.values()) / 2
        loss.backward()
        end_step(optimizer, session)
    session.detach()
    assert max(taken) > 0


def test_neither_a_new_plan_nor_updates_of_state_that_stays_are_a_cost_of_what_moves(tmp_path, monkeypatch):
    """Else it would seem that state is best left where it is, the more of it stays."""
    budget = int(0.7 * Trained("gpt2", tmp_path, "1GiB").peaks[-1])
    model = build()
    clock = SimpleNamespace(now_s=0.0, perf_counter=lambda: clock.now_s)
    let_stay, step_in_memory, counted = Streaming.let_stay, Shadow.step, []

    def let_stay_slowly(self, parameters):
        with self.state_store.storage.handling.of(OPTIMIZER_STATE):
            clock.now_s += 1000
        counted.append("a new plan")
        let_stay(self, parameters)

    def step_slowly(self, groups, state, attributes):
        if any(p in large and not streaming.moves(p) for one in groups for p in one["params"]):
            clock.now_s += 1000
            counted.append("an update")
        return step_in_memory(self, groups, state, attributes)

    session = attach(model, OffloadConfig(memory_budget=budget, directory=tmp_path, min_bytes=1024, params="none"))
    optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    large, streaming = {p for p in model.parameters() if p.nbytes >= 1024}, streaming_of(optimizer)
    monkeypatch.setattr("hf_offload.storage.handling.time", clock)
    monkeypatch.setattr(Streaming, "let_stay", let_stay_slowly)
    monkeypatch.setattr(Shadow, "step", step_slowly)
    first_steps(model, optimizer, session, steps=6)
    assert set(counted) == {"a new plan", "an update"}
    assert session._automatic._overhead._usual[OPTIMIZER_STATE][0] == 0.0
    session.detach()


def test_state_that_stays_leaves_for_a_longer_row_until_it_has_been_measured(tmp_path):
    def growing(number):
        return sized(12, TOKENS if number >= 6 else 2)(number)

    budget = int(3.2 * weight_bytes(build()))
    found = Trained("gpt2", tmp_path, budget, steps=9, batch=growing)
    assert 1 > found.shares_staying[5] > found.shares_staying[-1]
    assert found.shares_staying[6] == 0
    assert found.is_same(Trained("gpt2", tmp_path, steps=9, batch=growing))
    assert found.most_measured_bytes <= budget


def test_state_stays_again_after_many_longer_rows(tmp_path):
    """Each row that is longer than all before lets it leave; what that takes is no reason to leave it on the tier."""
    model, optimizer, session = within(tmp_path, 3.2)
    shares = []
    for number in range(24):
        with session.scope():
            model(**sized(12, 2 + number // 4)(number)).loss.backward()
        shares.append(share_staying(model, optimizer))
        end_step(optimizer, session)
    assert shares[4:].count(0) >= 5
    assert all(share > 0 for share in shares[3::4])
    session.detach()


def test_of_an_optimizer_that_is_prepared_again_all_state_leaves_that_a_plan_had_let_stay(tmp_path):
    model, kept = build(), Trained("gpt2", tmp_path, "1GiB")
    made = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = attach(model, OffloadConfig(memory_budget=int(0.8 * kept.peaks[-1]), directory=tmp_path, min_bytes=1024))
    session.prepare_optimizer(made)
    first_steps(model, made, session, steps=8)
    streaming = streaming_of(made)
    large = [p for p in model.parameters() if p.nbytes >= 1024]
    assert not all(map(streaming.moves, large))
    session.detach()
    session = attach(model, OffloadConfig(tier="none", optimizer="ssd", directory=tmp_path, min_bytes=1024))
    session.prepare_optimizer(made)
    assert streaming_of(made) is streaming
    assert all(map(streaming.moves, large))
    assert all(parked_of(tensor) is not None for p in large for tensor in streaming.state_tensors(p))
    session.detach()


def within(tmp_path, share):
    """A model, its optimizer and the session of a budget that is this multiple of the weights' bytes."""
    model = build()
    budget = int(share * weight_bytes(model))
    session = attach(model, OffloadConfig(memory_budget=budget, directory=tmp_path, min_bytes=1024))
    return model, session.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3)), session


def test_before_the_first_step_as_few_weights_as_possible_stay_and_little_waits_to_be_written(tmp_path):
    model, _, session = within(tmp_path, 1.2)
    most = max(*map(weight_bytes, model.transformer.h), *(parameter.nbytes for parameter in model.parameters()))
    assert session.residency.limit_bytes <= most
    assert session.plan.write_behind_bytes <= session.config.memory_budget // 16
    session.detach()


def first_steps(model, optimizer, session, batch=batch, steps=4):
    """Steps until there is a plan, and some under it."""
    for number in range(steps):
        with session.scope():
            model(**batch(number)).loss.backward()
        end_step(optimizer, session)


def test_what_a_step_waits_for_weights_and_state_is_not_taken_for_compute(tmp_path, monkeypatch):
    model, optimizer, session = within(tmp_path, 1.2)
    storage = storage_of(model)
    honest_clock, honest_wait, late_s = time.perf_counter, Tier.wait_until_done, 0

    def slow(tier, *futures):
        nonlocal late_s
        if any(tier.stats in tiers.values() for account, tiers in storage.accounts.items() if account != ACTIVATIONS):
            late_s += 1000
        honest_wait(tier, *futures)

    monkeypatch.setattr(Tier, "wait_until_done", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: honest_clock() + late_s)
    first_steps(model, optimizer, session)
    assert storage.handling.seconds(WAITS) > 1000
    assert session.planned.footprint.step_s < 1000
    session.detach()


def test_what_moving_bytes_takes_of_the_training_is_not_taken_for_compute(tmp_path, monkeypatch):
    model, optimizer, session = within(tmp_path, 1.2)
    assert session.residency is not None
    assert streaming_of(optimizer) is not None
    honest_clock, late_s = time.perf_counter, 0

    def slowed(honest):
        def slow(*args):
            nonlocal late_s
            late_s += 1000
            return honest(*args)

        return slow

    for owner, name in (
        (Engine, "_new_record"), (Units, "make_room"), (UpdateComputer, "compute"), (step, "park_gradient"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, slowed(getattr(owner, name)))
    monkeypatch.setattr(time, "perf_counter", lambda: honest_clock() + late_s)
    first_steps(model, optimizer, session)
    handling = storage_of(model).handling
    assert all(handling.seconds(kind) >= 1000 for kind in (ACTIVATIONS, WEIGHTS, OPTIMIZER_STATE, GRADIENTS))
    assert session.planned.footprint.step_s < 1000
    session.detach()


def sized(rows, tokens=TOKENS):
    def batch_of(number):
        drawn = torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(number))
        return {"input_ids": drawn, "labels": drawn.clone()}

    return batch_of


def test_the_first_step_keeps_to_a_budget_that_later_steps_keep_to(tmp_path):
    """Weights alone would leave a quarter of it for activations, which take more: they come back once that is known."""
    many = sized(12)
    budget = int(1.9 * weight_bytes(build()))
    found = Trained("gpt2", tmp_path, budget, batch=many)
    assert found.is_same(Trained("gpt2", tmp_path, batch=many))
    assert found.most_measured_bytes <= budget
    roomy = Trained("gpt2", tmp_path, 2 * budget, batch=many)
    assert roomy.streams
    assert not roomy.parks


def test_weights_that_have_all_come_back_have_the_bits_of_the_run_in_memory_with_a_state_dict_held(tmp_path):
    model, optimizer, session = within(tmp_path, 1.9)
    held = model.state_dict()
    assert any(parked_of(parameter) is not None for parameter in model.parameters())
    first_steps(model, optimizer, session, sized(12, 2))
    assert session.residency is None
    session.detach()
    expected = build()
    take_steps(expected, torch.optim.AdamW(expected.parameters(), lr=1e-3), map(sized(12, 2), range(4)))
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    assert all(torch.equal(held[name], parameter) for name, parameter in model.named_parameters())


def test_a_longer_row_lets_no_more_wait_to_be_written_than_a_first_step(tmp_path, monkeypatch):
    apply, applied = AutomaticPlan._apply, []

    def noted(automatic, plan):
        applied.append(plan.write_behind_bytes)
        apply(automatic, plan)

    def growing(number):
        if number == 4:
            applied.append(None)
        return sized(12, TOKENS if number == 4 else 2)(number)

    monkeypatch.setattr(AutomaticPlan, "_apply", noted)
    Trained("gpt2", tmp_path, int(2.5 * weight_bytes(build())), batch=growing)
    assert applied[applied.index(None) + 1] <= applied[0]


def test_a_weight_is_updated_in_parts_as_small_as_the_budget_asks_for(tmp_path):
    """Else the update of the only one would take as much as the budget was to spare."""

    def train(budget=None):
        torch.manual_seed(0)
        model = torch.nn.Linear(512, 1024)
        made = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given = {"tier": "none"} if budget is None else {"memory_budget": budget, "directory": tmp_path}
        session = attach(model, OffloadConfig(**given))
        session.prepare_optimizer(made)
        if (
            budget is not None
        ):  # in memory, a step takes six times the weight: with its gradient, state, and what it computes
            assert max(end - begin for begin, end in streaming_of(made).spans(model.weight)) <= budget // 16
        for number in range(4):
            rows = torch.randn(8, 512, generator=torch.Generator().manual_seed(number))
            with session.scope():
                model(rows).square().mean().backward()
            end_step(made, session)
        assert budget is None or session.most_measured_bytes <= budget
        session.detach()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(map(torch.equal, train(3 * 4 * 512 * 1024), train()))


def test_what_does_not_fit_beside_activations_leaves_after_the_first_step(tmp_path, caplog):
    model = build()
    persistent = 4 * weight_bytes(model)
    with caplog.at_level(logging.INFO, "hf_offload"):
        found = Trained("gpt2", tmp_path, int(1.04 * persistent), optimizer=FUSED)
    assert found.streams
    assert found.is_same(Trained("gpt2", tmp_path, optimizer=FUSED))
    messages = [record.getMessage() for record in caplog.records]
    assert any("go to ssd, for activations do not fit next to them" in message for message in messages)


class Coupled(torch.optim.AdamW):
    """Its step looks at all gradients together."""

    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            group["lr"] = 1e-3 / (1 + norm)
        return super().step(closure)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"optimizer": Coupled}, "stay in memory, though"), ({"prepare": False}, "prepare_optimizer")],
)
def test_where_no_optimizer_can_be_streamed_the_plan_says_so(settings, said, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "hf_offload"), pytest.raises(OffloadPlanError, match="too small"):
        Trained("gpt2", tmp_path, "1MiB", steps=2, **settings)
    assert said in caplog.text


def test_frozen_weights_leave_memory_without_any_optimizer(tmp_path):
    model = build("llama").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=1e-3)
    session = attach(model, OffloadConfig(memory_budget=weight_bytes(model), directory=tmp_path, min_bytes=1024))
    assert session.prepare_optimizer(optimizer) is optimizer
    assert session.residency is not None
    session.detach()


def test_the_trainer_moves_what_does_not_fit(tmp_path):
    def trained(**settings):
        rows = [{name: value[0] for name, value in batch(number).items()} for number in range(4)]
        trainer = make_trainer(tmp_path / "run", build(), data=rows, max_steps=2, **settings)
        trainer.train()
        return streaming_of(trainer.optimizer.optimizer) is not None, copied(list(trainer.model.parameters()))

    auto = {"offload": "auto", "offload_min_bytes": 1024, "offload_directory": str(tmp_path)}
    plain = trained()
    roomy, tight = (trained(offload_memory_budget=one, **auto) for one in ("1GiB", 3 * weight_bytes(build())))
    assert [one[0] for one in (plain, roomy, tight)] == [False, False, True]
    for other in (roomy, tight):
        assert all(map(torch.equal, plain[1], other[1]))


@pytest.mark.parametrize("directory", [None, "snapshots"])
def test_a_plan_leaves_room_for_snapshots(directory, tmp_path):
    where = None if directory is None else tmp_path / directory
    session = attach(build(), OffloadConfig(tier="auto", directory=tmp_path, snapshot_steps=5, snapshot_dir=where))
    assert session._state.allowed.snapshots == (2 if directory is None else 3)
    session.detach()


def test_auto_is_the_default_with_the_tier_auto_alone():
    assert OffloadConfig().state_place == OffloadConfig().weights_place == "auto"
    config = OffloadConfig(tier="ssd")
    assert config.state_place == config.weights_place == "none"
    assert OffloadConfig(optimizer="none", params="ram").state_place == "none"
