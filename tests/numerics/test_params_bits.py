"""Weights on a tier, on twenty architectures: losses, gradients, weights, generated tokens and evaluation are those of the
run in memory.
"""

import itertools

import peft
import pytest
import torch

from hf_offload import OffloadConfig
from hf_offload.session import attach
from tests.helpers.architectures import ARCHITECTURES, generate, make_batch, make_model
from tests.helpers.train import copied, same

STEPS = 3
TUNED = ("full", "lora")
PLACES = ("ram", "ssd")
WAYS = tuple(itertools.product(TUNED, PLACES, (False, True), ("none", "ssd")))  # checkpointed, optimizer
COMBINATIONS = tuple(itertools.product(ARCHITECTURES, WAYS))


def label(combination) -> str:
    name, (tuned, place, checkpointed, optimizer) = combination
    return f"{name}-{tuned}-{place}-{'checkpointed' if checkpointed else 'saved'}-optimizer_{optimizer}"


def in_the_suite(number: int) -> bool:
    """Each architecture once, and ways in turns."""
    return number % len(WAYS) == 5 * (number // len(WAYS)) % len(WAYS)


def run(combination, moved, folder):
    """All that a run computes, by name, and its session."""
    name, (tuned, place, checkpointed, optimizer_place) = combination
    model = make_model(name)
    if tuned == "lora":
        targets = ["in_proj", "x_proj", "embeddings"] if name == "mamba" else "all-linear"  # which it does not allow
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    if checkpointed and model.supports_gradient_checkpointing:
        reentrant = tuned == "full" and place == "ssd"
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    session = None
    if moved:
        config = OffloadConfig(
            tier="none",
            params=place,
            optimizer=optimizer_place,
            min_bytes=256,
            directory=folder if "ssd" in (place, optimizer_place) else None,
        )
        session = attach(model, config)
        session.prepare_optimizer(optimizer)
        session.defer_updates()
        session.residency.limit_bytes = 1 if tuned == "full" else session.residency.total_bytes // 4
        session.residency.begin_run()
    torch.manual_seed(11)
    results = {}
    for step in range(STEPS):
        loss = model(**make_batch(name, seed=step)).loss
        loss.backward()
        results[f"loss {step}"] = loss.item()
        if step != 1:  # reading them is no part of a usual step
            results[f"gradients {step}"] = {n: copied(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        output = model(**make_batch(name, seed=100))
        results["evaluation"] = {key: copied(value) for key, value in output.items() if torch.is_tensor(value)}
        results["generated"] = copied(generate(name, model, seed=101))
    most_bytes = None if session is None else session.residency.most_bytes
    results["weights"] = copied(model.state_dict())
    results["state"] = copied(optimizer.state_dict())
    return results, session, most_bytes, model


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::RuntimeWarning", "ignore:.*is_gradient_checkpointing:FutureWarning"
)
@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(each, id=label(each), marks=() if in_the_suite(number) else pytest.mark.full)
        for number, each in enumerate(COMBINATIONS)
    ],
)
def test_three_steps_evaluation_and_generation_have_the_bits_of_the_run_in_memory(combination, tmp_path):
    expected, *_ = run(combination, False, tmp_path)
    found, session, most_bytes, model = run(combination, True, tmp_path)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not same(expected[name], found[name])] == []
    assert 0 < most_bytes < session.residency.total_bytes  # two blocks of two, and what is next to them
    moved = session.residency.store.tier.stats
    assert moved.written_bytes > session.residency.total_bytes / 2
    assert moved.read_bytes > session.residency.total_bytes
    del model
