"""MeZO: its bits beside a second implementation, its log, and what it refuses."""

import copy
import math
import random
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, attach
from hf_offload.errors import StorageError
from hf_offload.optimizers.mezo import MeZO, MezoLog, replay, trajectory
from hf_offload.optimizers.mezo.directions import checksum
from tests.helpers.live_bytes import peak_live_bytes
from tests.helpers.tables import rows
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights

STEPS = 6
EPS = 1e-2
NAME = "model.embed_tokens.weight"
ARCHITECTURES = ["gpt2", "bert", "t5", "llama"]


class ReferenceMeZO:
    """As the authors wrote it, out of place, with groups."""

    def __init__(self, model, groups, eps, restore):
        self.model, self.groups, self.eps, self.restore = model, groups, eps, restore
        ids = {id(p): group for group in groups for p in group["params"]}
        self.parameters = [(p, ids[id(p)]) for p in model.parameters() if id(p) in ids and p.requires_grad]

    def directions(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for p, group in self.parameters:
            yield p, group, torch.normal(mean=0, std=1, size=p.data.size(), dtype=p.dtype, generator=generator)

    def perturb(self, seed, scaling_factor):
        for p, _, z in self.directions(seed):
            p.data = p.data + scaling_factor * z * self.eps

    @torch.no_grad()
    def step(self, seed, loss_of):
        training = self.model.training
        self.model.eval()
        before = [p.data.clone() for p, _ in self.parameters]
        self.perturb(seed, 1)
        loss1 = loss_of(self.model)
        self.perturb(seed, -2)
        loss2 = loss_of(self.model)
        self.perturb(seed, 1)
        self.model.train(training)
        if self.restore == "pristine":
            for (p, _), data in zip(self.parameters, before, strict=True):
                p.data = data
        gradient = ((loss1 - loss2) / (2 * self.eps)).item()
        for p, group, z in self.directions(seed):
            step = gradient * z + group["weight_decay"] * p.data if group["weight_decay"] else gradient * z
            p.data = p.data - group["lr"] * step
        return loss1.item(), gradient


def groups_of(model):
    """Three, each with a rate and a decay of its own, not in the model's order; some weights are frozen."""
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    norms = [one for name, one in named if one.dim() == 1]
    others = [one for name, one in named if one.dim() > 1]
    return [
        {"params": norms, "lr": 3e-3, "weight_decay": 0.0},
        {"params": others[1::2], "lr": 1e-3, "weight_decay": 0.1},
        {"params": others[::2], "lr": 2e-3, "weight_decay": 0.01},
    ]


def made(name, dtype=torch.float32):
    model = tiny_model(name).to(dtype)
    next(iter(model.parameters())).requires_grad_(name != "t5")
    return model


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step, k=k: 1 / (k + step) for k in (1, 2, 3)])


def mean_loss(model, name, step):
    return model(**tiny_batch(name, seed=step)).loss.float()


@pytest.fixture(scope="module")
def same_seeds():
    model = tiny_model("gpt2")
    optimizer = MeZO(model.parameters(), model, lr=0.0)
    for _ in range(STEPS):
        optimizer.step(lambda: model.transformer.ln_f.weight.sum())
    seeds = [row.seed for row in optimizer.log.rows]
    assert len(set(seeds)) == STEPS
    return seeds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("restore", ["reference", "pristine"])
@pytest.mark.parametrize("name", rows(ARCHITECTURES, quick=["gpt2", "t5", "llama"]))
def test_bits_of_a_second_implementation(name, restore, dtype, same_seeds):
    theirs = made(name, dtype)
    groups = groups_of(theirs)
    reference = ReferenceMeZO(theirs, groups, EPS, restore)
    scheduled = torch.optim.SGD([dict(group) for group in groups])
    scheduler = schedule(scheduled)
    expected = []
    for step, seed in enumerate(same_seeds):
        for group, current in zip(groups, scheduled.param_groups, strict=True):
            group["lr"] = current["lr"]
        expected.append(reference.step(seed, lambda model, step=step: mean_loss(model, name, step)))
        scheduled.step()
        scheduler.step()

    ours = made(name, dtype)
    optimizer = MeZO(groups_of(ours), ours, eps=EPS, restore=restore)
    scheduler = schedule(optimizer)
    found = []
    for step in range(STEPS):
        loss = optimizer.step(lambda step=step: mean_loss(ours, name, step))
        found.append((loss.item(), optimizer.projected_gradient))
        scheduler.step()
    assert [row.seed for row in optimizer.log.rows] == same_seeds
    assert found == expected
    assert all(gradient for _, gradient in found)
    before, after = weights(theirs), weights(ours)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert ours.training
    assert all(one.grad is None for one in ours.parameters())


def test_restoring_leaves_rounding_errors_or_none():
    """What the two choices are about."""
    left = {}
    for restore in ("reference", "pristine"):
        model = tiny_model("llama")
        before = weights(model)
        MeZO(model.parameters(), model, eps=EPS, restore=restore).evaluate(
            lambda model=model: mean_loss(model, "llama", 0)
        )
        after = weights(model)
        left[restore] = sum(int((after[key] != before[key]).sum()) for key in before)
    assert left["pristine"] == 0 < left["reference"]


def double_loss(model, name):
    """The loss of transformers is in float32, which has too few digits here."""
    batch = tiny_batch(name, seed=0)
    logits = model(input_ids=batch["input_ids"]).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def directional_derivative(model, optimizer, name):
    seed = optimizer.log.rows[-1].seed
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    double_loss(model, name).backward()
    return sum(
        float((torch.empty_like(one, requires_grad=False).normal_(generator=generator) * one.grad).sum())
        for one in model.parameters()
    )


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_projected_gradient_is_the_derivative_along_the_direction(name):
    model = tiny_model(name).double()
    optimizer = MeZO(model.parameters(), model, eps=1e-5, restore="pristine", lr=0.0)
    optimizer.step(lambda: double_loss(model, name))
    expected = directional_derivative(model, optimizer, name)
    assert abs(expected) > 1e-3
    assert optimizer.projected_gradient == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------------------------------- seeds, gradients, modes


def first_seed_is_zero():
    """The seed whose first step has the seed 0: the one that mixes to 0."""
    factor = 0x9E3779B97F4A7C15
    found = (-pow(factor, -1, 1 << 64)) % (1 << 64)
    return found - (1 << 64) if found >> 63 else found


def run(model, optimizer, first=0, steps=STEPS, name="llama"):
    for step in range(first, first + steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step(lambda step=step: mean_loss(model, name, step))


def test_a_step_with_the_seed_0_is_a_step_like_others():
    model = tiny_model("llama")
    optimizer = MeZO(model.parameters(), model, eps=EPS, lr=1e-2, seed=first_seed_is_zero())
    initial = weights(model)
    theirs = tiny_model("llama")
    group = {"params": list(theirs.parameters()), "lr": 1e-2, "weight_decay": 0.0}
    ReferenceMeZO(theirs, [group], EPS, "reference").step(0, lambda model: mean_loss(model, "llama", 0))
    optimizer.step(lambda: mean_loss(model, "llama", 0))
    assert optimizer.log.rows[0].seed == 0
    found, expected = weights(model), weights(theirs)
    assert all(torch.equal(found[key], expected[key]) for key in found)
    replay(optimizer.log, initial)
    assert all(torch.equal(found[key], initial[key]) for key in found)


def test_a_gradient_of_0_still_decays():
    model = tiny_model("llama")
    before = weights(model)
    optimizer = MeZO(model.parameters(), model, lr=0.5, weight_decay=0.5, restore="pristine")
    optimizer.step(lambda: torch.ones(()))
    assert optimizer.projected_gradient == 0.0
    after = weights(model)
    for key, one in before.items():
        assert torch.equal(after[key], one - 0.5 * (0.5 * one)), key
    initial = copy.deepcopy(before)
    replay(optimizer.log, initial)
    assert all(torch.equal(initial[key], after[key]) for key in after)


def test_losses_are_computed_in_eval_mode_without_a_graph_and_modes_come_back():
    model = tiny_model("gpt2", dropout=0.5)
    model.transformer.h[1].eval()
    before = [one.training for one in model.modules()]
    seen = []

    def closure():
        loss = model(**tiny_batch("gpt2", seed=0)).loss
        seen.append((loss.requires_grad, any(one.training for one in model.modules())))
        return loss

    MeZO(model.parameters(), model).step(closure)
    assert seen == [(False, False)] * 2
    assert [one.training for one in model.modules()] == before


def test_an_autocast_around_the_step_does_not_reuse_casts_of_other_weights():
    found = []
    for inside in (True, False):
        model = tiny_model("llama")
        optimizer = MeZO(model.parameters(), model, eps=EPS, lr=1e-2)
        cast = torch.autocast("cpu", torch.bfloat16)

        def closure(model=model, inside=inside, cast=cast):
            if not inside:
                return mean_loss(model, "llama", 0)
            with cast:
                return mean_loss(model, "llama", 0)

        if inside:
            optimizer.step(closure)
        else:
            with cast:
                optimizer.step(closure)
        found.append((optimizer.projected_gradient, weights(model)))
    (inner, inner_weights), (outer, outer_weights) = found
    assert inner == outer != 0
    assert all(torch.equal(one, outer_weights[key]) for key, one in inner_weights.items())


def test_directions_of_steps_and_seeds_differ_and_each_is_normal():
    found = []
    for seed in (0, 1):
        model = tiny_model("llama")
        before = weights(model)
        optimizer = MeZO(model.parameters(), model, eps=1.0, seed=seed, restore="pristine")
        seen = []
        for _ in range(2):
            optimizer.evaluate(lambda model=model, seen=seen: (seen.append(weights(model)), torch.zeros(()))[1])
        found += [torch.cat([(one[key] - before[key]).flatten() for key in before]) for one in seen[::2]]
    matrix = torch.corrcoef(torch.stack(found))
    assert (matrix - torch.eye(4)).abs().max() < 0.05
    assert all(abs(one.std().item() - 1) < 0.02 for one in found)


# ------------------------------------------------------------------------------------------------------ log and resuming


@pytest.mark.parametrize("restore", ["reference", "pristine"])
def test_the_log_gives_every_step_and_survives_files(restore, tmp_path):
    model = tiny_model("llama")
    initial = weights(model)
    optimizer = MeZO(groups_of(model), model, eps=EPS, restore=restore, seed=7)
    scheduler = schedule(optimizer)
    after = []
    for step in range(STEPS):
        optimizer.step(lambda step=step: mean_loss(model, "llama", step))
        scheduler.step()
        after.append(weights(model))
    optimizer.save_log(tmp_path / "log.safetensors")
    log = MezoLog.load(tmp_path / "log.safetensors")
    assert log.rows == optimizer.log.rows
    assert log.setup == optimizer.log.setup
    for count in (1, 3, STEPS):
        rebuilt = copy.deepcopy(initial)
        replay(log, rebuilt, count)
        assert all(torch.equal(rebuilt[key], after[count - 1][key]) for key in rebuilt), count
    changed = copy.deepcopy(initial)
    list(changed.values())[3].view(-1)[5] += 1e-3
    with pytest.raises(OffloadConfigError, match="are not what they were before the first step"):
        replay(log, changed)
    log.final = (log.final[0] + 1, *log.final[1:])
    with pytest.raises(OffloadError, match="are not what they were after the last step"):
        replay(log, copy.deepcopy(initial))


def test_a_closure_that_calls_train_is_refused_and_weights_go_back():
    model = tiny_model("gpt2")
    before = weights(model)
    optimizer = MeZO(model.parameters(), model, eps=EPS, restore="pristine")

    def closure():
        model.train()
        return mean_loss(model, "gpt2", 0)

    with pytest.raises(OffloadError, match=r"has called train\(\)"):
        optimizer.step(closure)
    assert all(torch.equal(one, before[name]) for name, one in weights(model).items())


def test_a_state_is_not_taken_over_with_other_weights_than_it_was_saved_with():
    model = tiny_model("llama")
    optimizer = MeZO(model.parameters(), model, eps=EPS, lr=1e-2)
    run(model, optimizer, steps=2)
    state, trained = copy.deepcopy(optimizer.state_dict()), weights(model)
    other = tiny_model("llama")
    with torch.no_grad():
        for name, one in other.named_parameters():
            one.copy_(trained[name])
        other.model.norm.weight.add_(1)
    before = weights(other)
    again = MeZO(other.parameters(), other, eps=EPS, lr=1e-2)
    again.load_state_dict(state)
    with pytest.raises(
        OffloadConfigError, match=r"other weights than the model has: 1 of \d+ differ, such as model\.norm"
    ):
        run(other, again, first=2, steps=1)
    assert all(torch.equal(one, before[name]) for name, one in weights(other).items())
    with torch.no_grad():
        other.model.norm.weight.copy_(trained["model.norm.weight"])
    run(other, again, first=2, steps=1)
    run(model, optimizer, first=2, steps=1)
    assert again.log.rows == optimizer.log.rows


def test_a_log_whose_weights_something_else_has_changed_is_not_taken_for_true():
    model = tiny_model("llama")
    initial = weights(model)
    optimizer = MeZO(model.parameters(), model, eps=EPS, lr=1e-2)
    run(model, optimizer, steps=2)
    after = weights(model)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    run(model, optimizer, first=2, steps=2)
    log = MezoLog.from_state(optimizer.state_dict())
    rebuilt = copy.deepcopy(initial)
    replay(log, rebuilt, 2)
    assert all(torch.equal(one, after[name]) for name, one in rebuilt.items())
    with pytest.raises(OffloadError, match=r"1 of .*norm.* after the last step. Something other than MeZO has changed"):
        replay(log, copy.deepcopy(initial))
    with pytest.raises(OffloadConfigError, match="are not what they were before the first step"):
        replay(log, after)


def test_a_weight_that_forwards_change_is_named_once_and_trains_like_the_reference(caplog):
    """``max_norm`` scales rows of an embedding in place when they are looked up."""
    model, expected = tiny_model("gpt2"), tiny_model("gpt2")
    for each in (model, expected):
        each.transformer.wpe.max_norm = 0.05
    initial = weights(model)
    optimizer = MeZO(model.parameters(), model, eps=EPS, lr=1e-2)
    run(model, optimizer, steps=2, name="gpt2")
    groups = [{"params": list(expected.parameters()), "lr": 1e-2, "weight_decay": 0}]
    reference = ReferenceMeZO(expected, groups, EPS, "reference")
    for step, row in enumerate(optimizer.log.rows):
        groups[0]["lr"] = row.rates[0]
        reference.step(row.seed, lambda model, step=step: mean_loss(model, "gpt2", step))
    assert all(torch.equal(one, weights(expected)[name]) for name, one in weights(model).items())
    assert caplog.text.count("changes 1 of its weights in place while it computes a loss, such as transformer.wpe") == 1
    with pytest.raises(OffloadError, match=r"transformer.wpe.weight, are not what they were after the last step"):
        replay(MezoLog.from_state(optimizer.state_dict()), initial)


@pytest.mark.parametrize("restore", ["reference", "pristine"])
def test_a_damaged_log_is_noticed_whatever_is_missing_or_changed(restore, tmp_path):
    model = tiny_model("llama")
    optimizer = MeZO(model.parameters(), model, eps=EPS, lr=1e-2, restore=restore)
    run(model, optimizer, steps=2)
    path = tmp_path / "mezo_log.safetensors"
    optimizer.save_log(path)
    whole = path.read_bytes()
    assert MezoLog.load(path).rows == optimizer.log.rows
    tensors = load_file(path)
    (begin,) = struct.unpack("<Q", whole[:8])
    flipped = bytearray(whole)
    flipped[8 + begin + 3] ^= 1
    setup = tensors["setup"].clone()
    setup[3] += 1
    damaged = [
        *({key: one for key, one in tensors.items() if key != name} for name in tensors if name != "digest"),
        *(tensors | {name: one[..., :0].contiguous()} for name, one in tensors.items()),
        tensors | {"seeds": tensors["seeds"].double()},
        tensors | {"setup": setup},
    ]
    contents = [bytes(flipped), *map(save, damaged)]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(OffloadConfigError, match=r"mezo_log.safetensors is damaged, or another version"):
            MezoLog.load(path)
        state = {"mezo": torch.frombuffer(bytearray(content), dtype=torch.uint8)}
        with pytest.raises(OffloadConfigError, match="This state of MeZO is damaged"):
            optimizer.load_state_dict(optimizer.state_dict() | state)
    optimizer.load_state_dict(optimizer.state_dict())


def test_weights_in_another_order_are_other_weights():
    model = tiny_model("llama")
    initial = weights(model)
    optimizer = MeZO(model.parameters(), model, eps=EPS, lr=1e-2)
    run(model, optimizer, steps=2)
    state = optimizer.state_dict()
    with pytest.raises(OffloadConfigError, match=rf"1 of .* weights, such as {NAME}, are not"):
        replay(MezoLog.from_state(state), initial | {NAME: initial[NAME].flip(0)}, steps=1)
    with torch.no_grad():
        model.get_parameter(NAME).copy_(weights(model)[NAME].flip(0))
    again = MeZO(model.parameters(), model, eps=EPS, lr=1e-2)
    again.load_state_dict(state)
    with pytest.raises(OffloadConfigError, match=rf"1 of .* differ, such as {NAME}"):
        run(model, again, first=2, steps=1)


def test_a_replay_names_one_weight_of_many():
    model = tiny_model("llama")
    optimizer = MeZO(model.parameters(), model, eps=EPS, lr=1e-2)
    run(model, optimizer, steps=1)
    given, count = weights(model), len(optimizer.log.setup.names)
    for wrong, message in (
        ({}, f"The log has {count} weights, such as model.embed_tokens.weight, which are not"),
        (
            {name: one.double() for name, one in given.items()},
            f"in torch.float64 on cpu, and in the log .* in torch.float32 on cpu, and {count - 1} others differ, too",
        ),
        (
            {name: one.to("meta") for name, one in given.items()},
            "on meta, and in the log .* on cpu.* draw other numbers",
        ),
    ):
        with pytest.raises(OffloadConfigError, match=message) as error:
            replay(optimizer.log, wrong)
        assert len(str(error.value)) < 400


def test_a_step_takes_a_few_bytes(tmp_path):
    model = tiny_model("llama")
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2]}]
    optimizer = MeZO(groups, model, lr=1e-2)
    sizes = []
    for _ in range(2):
        for step in range(100):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + step)
            optimizer.step(lambda: torch.zeros(()))
        optimizer.save_log(tmp_path / "log")
        sizes.append((tmp_path / "log").stat().st_size)
    assert (sizes[1] - sizes[0]) / 100 < 25


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path):
    whole = tiny_model("llama")
    optimizer = MeZO(whole.parameters(), whole, eps=EPS, lr=1e-2)
    run(whole, optimizer, steps=3)
    torch.save({"optimizer": optimizer.state_dict(), "model": whole.state_dict()}, tmp_path / "saved.pt")
    run(whole, optimizer, first=3, steps=3)

    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    again = tiny_model("llama", seed=3)
    again.load_state_dict(saved["model"])
    other = MeZO(again.parameters(), again, eps=EPS, lr=1e-2)
    other.load_state_dict(saved["optimizer"])
    run(again, other, first=3, steps=3)
    assert other.log.rows == optimizer.log.rows
    assert len(other.log.rows) == STEPS
    found, expected = weights(again), weights(whole)
    assert all(torch.equal(found[key], expected[key]) for key in found)
    initial = weights(tiny_model("llama"))
    replay(other.log, initial)
    assert all(torch.equal(initial[key], expected[key]) for key in expected)


@pytest.mark.parametrize("restore", ["reference", "pristine"])
@pytest.mark.parametrize("call", [1, 2])
def test_weights_come_back_whatever_the_closure_raises_and_the_log_knows_it(call, restore):
    model = tiny_model("llama")
    initial = weights(model)
    optimizer = MeZO(model.parameters(), model, eps=EPS, lr=1e-2, restore=restore)
    calls = []

    def closure():
        calls.append(None)
        if len(calls) == call:
            raise KeyboardInterrupt
        return mean_loss(model, "llama", 0)

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    after = weights(model)
    for key, one in initial.items():
        assert torch.allclose(one, after[key], rtol=0, atol=5e-7)
        assert restore == "reference" or torch.equal(one, after[key])
    assert model.training
    with pytest.raises(OffloadError, match="no losses to work with"):
        optimizer.step()
    run(model, optimizer, steps=2)
    assert [row.updates for row in optimizer.log.rows] == [False, True, True]
    replay(optimizer.log, initial)
    expected = weights(model)
    assert all(torch.equal(initial[key], expected[key]) for key in expected)


@pytest.mark.parametrize("count", [1, 4])
def test_an_error_while_weights_change_is_not_forgotten(count, monkeypatch):
    """In the first move, and in the update."""
    model = tiny_model("llama")
    optimizer = MeZO(model.parameters(), model, restore="pristine")
    names = [name for name, _ in model.named_parameters()]
    make_moves, calls = trajectory.make_moves, []

    def fail(weight, *args):
        calls.append(weight)
        if len(calls) == {1: 2, 4: 2 * len(names) + 2}[count]:
            weight.add_(1)
            raise StorageError("the drive has gone")
        make_moves(weight, *args)

    monkeypatch.setattr(trajectory, "make_moves", fail)
    with pytest.raises(StorageError):
        optimizer.step(lambda: torch.ones(()))
    monkeypatch.undo()
    for call in (
        lambda: optimizer.step(lambda: torch.ones(())),
        lambda: optimizer.evaluate(lambda: torch.ones(())),
        lambda: optimizer.save_log("unused"),
        lambda: model.state_dict()[names[1]].sum(),
        lambda: model(**tiny_batch("llama", seed=0)),
    ):
        with pytest.raises(OffloadError, match=f"An earlier error came while MeZO changed the weight {names[1]}"):
            call()


def test_weights_that_an_error_has_kept_from_moving_do_so_before_they_are_read(monkeypatch):
    """In memory, such as when a direction finds no memory."""
    found = []
    for fails in (False, True):
        model = tiny_model("llama")
        optimizer = MeZO(model.parameters(), model, eps=EPS, lr=1e-2)
        run(model, optimizer, steps=1)
        memory_for, calls = trajectory.memory_for, []

        def fail(*args, fails=fails, memory_for=memory_for, calls=calls):
            calls.append(None)
            if fails and len(calls) == 3:
                raise torch.OutOfMemoryError
            return memory_for(*args)

        with monkeypatch.context() as patched:
            patched.setattr(trajectory, "memory_for", fail)
            with pytest.raises(torch.OutOfMemoryError if fails else KeyboardInterrupt):
                optimizer.step(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        after = {name: one.clone() for name, one in model.state_dict().items()}
        run(model, optimizer, first=1, steps=1)
        found.append((after, weights(model)))
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(each, other[name]) for name, each in one.items())


def test_a_step_needs_a_piece_of_a_direction():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(2)))
    optimizer = MeZO(model.parameters(), model, weight_decay=0.1)
    step = lambda: optimizer.step(lambda: torch.ones(()))  # noqa: E731
    step()
    assert peak_live_bytes(step) < 1024 * 1024 * 4 * 3 / 4


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(value):
    model = tiny_model("llama")
    before = weights(model)
    optimizer = MeZO(model.parameters(), model, restore="pristine")
    with pytest.raises(OffloadError, match=r"Step 1 of MeZO: the losses are (nan|inf) .* not finite.*all are -100"):
        optimizer.step(lambda: torch.tensor(value))
    after = weights(model)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_loss_with_few_digits_is_noticed(caplog):
    model = tiny_model("llama")
    optimizer = MeZO(model.parameters(), model)
    optimizer.step(lambda: torch.ones((), dtype=torch.bfloat16))
    optimizer.step(lambda: torch.ones((), dtype=torch.bfloat16))
    assert [record.message for record in caplog.records if record.name == MeZO.__module__] == [
        "MeZO divides the difference of two losses by 2 eps, and the loss is torch.bfloat16, which has too few digits for "
        "that: compute it in float32."
    ]


def test_what_is_no_loss_is_refused():
    model = tiny_model("llama")
    optimizer = MeZO(model.parameters(), model)
    with pytest.raises(OffloadError, match=r"returned a tensor of shape \(2,\)"):
        optimizer.step(lambda: torch.zeros(2))
    with pytest.raises(OffloadError, match="returned NoneType"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.0}, r"eps=0\.0: give a number above 0"),
        ({"restore": "exact"}, "restore='exact' is unknown"),
        ({"lr": -1.0}, r"lr=-1\.0 of group 0"),
        ({"weight_decay": -1.0}, r"weight_decay=-1\.0 of group 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    model = tiny_model("llama")
    with pytest.raises(OffloadConfigError, match=message):
        MeZO(model.parameters(), model, **options)


def test_wrong_parameters_are_refused():
    model = tiny_model("llama")
    with pytest.raises(OffloadConfigError, match="1 parameters are not the model's"):
        MeZO([*model.parameters(), torch.nn.Parameter(torch.ones(2))], model)
    with pytest.raises(OffloadConfigError, match="No parameter requires gradients"):
        MeZO(model.requires_grad_(False).parameters(), model)
    meta = tiny_model("llama").to("meta")
    with pytest.raises(OffloadConfigError, match="has no data"):
        MeZO(meta.parameters(), meta)
    half = tiny_model("llama")
    half.lm_head.to("meta")
    with pytest.raises(OffloadConfigError, match="draws directions on one device"):
        MeZO(half.parameters(), half)
    model = tiny_model("llama")
    optimizer = MeZO(model.parameters(), model)
    with pytest.raises(OffloadConfigError, match="parameters are fixed"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(OffloadError, match="was frozen after MeZO was made"):
        optimizer.step(lambda: torch.zeros(()))


def test_gradients_are_refused():
    model = tiny_model("llama")
    optimizer = MeZO(model.parameters(), model)
    mean_loss(model, "llama", 0).backward()
    with pytest.raises(OffloadError, match=r"has a gradient, which MeZO does not use: pass a closure"):
        optimizer.step(lambda: torch.zeros(()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.5}, r"saved with eps=0\.001, and the optimizer has 0\.5"),
        ({"seed": 1}, "saved with seed=0"),
        ({"restore": "pristine"}, "saved with restore='reference'"),
    ],
)
def test_a_state_of_other_settings_is_refused(options, message):
    model = tiny_model("llama")
    state = MeZO(model.parameters(), model).state_dict()
    with pytest.raises(OffloadConfigError, match=message):
        MeZO(model.parameters(), model, **options).load_state_dict(state)


def test_a_state_of_another_optimizer_or_model_is_refused():
    model = tiny_model("llama")
    optimizer = MeZO(model.parameters(), model)
    with pytest.raises(OffloadConfigError, match="not saved by MeZO"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())
    other = tiny_model("gpt2")
    with pytest.raises(OffloadConfigError, match="saved with names="):
        optimizer.load_state_dict(MeZO(other.parameters(), other).state_dict())


def test_checksums_see_every_bit_and_the_order():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        one = torch.randn(40, 50).to(dtype)
        other = one.clone()
        assert checksum(one) == checksum(other) == checksum(one.T.contiguous().T)
        assert len({checksum(each) for each in (one, one.flip(0), one.flip(1), one.T)}) == 4
        other.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()])[3, 4] ^= 1
        assert checksum(one) != checksum(other)


# --------------------------------------------------------------------------------------------------- a session's optimizer


def test_a_session_gives_an_optimizer_with_the_groups_and_schedules_of_the_scripts():
    ours = made("llama")
    session = attach(ours, OffloadConfig(tier="none", memory_mode="mezo", memory_mode_kwargs={"eps": EPS}))
    given = torch.optim.AdamW(groups_of(ours))
    scheduler = schedule(given)
    optimizer = session.prepare_optimizer(given)
    assert isinstance(optimizer, MeZO)
    theirs = made("llama")
    direct = MeZO(groups_of(theirs), theirs, eps=EPS)
    other = schedule(direct)
    for step in range(STEPS):
        optimizer.step(lambda step=step: mean_loss(ours, "llama", step))
        direct.step(lambda step=step: mean_loss(theirs, "llama", step))
        scheduler.step()
        other.step()
    assert optimizer.log.rows == direct.log.rows
    assert len({row.rates for row in direct.log.rows}) == STEPS
    found, expected = weights(ours), weights(theirs)
    assert all(torch.equal(found[key], expected[key]) for key in found)
    loss = mean_loss(ours, "llama", 0)
    with pytest.raises(OffloadError, match="memory_mode='mezo' has no gradients, and backward has computed one"):
        loss.backward()
    with pytest.raises(OffloadError, match=r"no gradients, which clip_grad_norm_\(\) works on"):
        session.clip_grad_norm_(1.0)
    session.detach()
    ours.zero_grad()
    mean_loss(ours, "llama", 0).backward()


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(()), random.random, np.random.rand], ids=["torch", "python", "numpy"]
)
def test_both_losses_draw_the_same_numbers_and_the_next_step_draws_others(draw):
    model = nn.Linear(4, 4)
    optimizer = MeZO(model.parameters(), model)
    losses = []
    for _ in range(2):
        losses.append(optimizer.evaluate(lambda: model.weight.sum() * 0 + draw()).item())
        assert optimizer.projected_gradient == 0.0
    assert losses[0] != losses[1]
