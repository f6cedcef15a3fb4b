"""Optimizer state and gradients on a tier, some steps on each architecture.

Losses, norms, weights and the whole state dict are those of the run in memory, also of one that was resumed half way.
"""

import contextlib
import itertools

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig
from hf_offload.session import attach
from hf_offload.state.optimizer import streaming_of
from tests.helpers.tiny_models import NAMES, tiny_batch, tiny_model

STEPS = 6
PRECISIONS = ("float32", "autocast", "bfloat16")
PLACES = ("ram", "ssd")
WAYS = tuple(itertools.product((False, True), (False, True), (1, 3)))  # fused, clipped, backwards a step
COMBINATIONS = tuple(itertools.product(NAMES, PRECISIONS, PLACES, WAYS))


def label(combination) -> str:
    name, precision, place, (fused, clipped, backwards) = combination
    return f"{name}-{precision}-{place}-{'fused' if fused else 'loop'}-{'clipped' if clipped else 'free'}-{backwards}"


def in_the_suite(number: int) -> bool:
    """Each architecture with each precision, and places and ways in turns."""
    which, way = divmod(number, len(WAYS))
    architecture, place = which // len(PLACES), which % len(PLACES)
    turn, own = divmod(architecture, len(WAYS))
    return way == own and place == (own + turn) % len(PLACES)


class Training:
    """A model, its optimizer, and the steps they have made."""

    def __init__(self, combination, place, folder):
        name, self.precision, _, (fused, self.clipped, self.backwards) = combination
        self.name = name
        self.model = tiny_model(name)
        if self.precision == "bfloat16":
            self.model.to(torch.bfloat16)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1, (step + 1) / 4))
        self.session = None
        if place != "none":
            config = OffloadConfig(
                tier="none", optimizer=place, min_bytes=1024, directory=folder if place == "ssd" else None
            )
            self.session = attach(self.model, config)
            self.session.prepare_optimizer(self.optimizer)
            self.session.defer_updates()
        self.losses, self.norms = [], []
        torch.manual_seed(11)  # of dropout

    def run(self, first, last):
        for step in range(first, last):
            for number in range(self.backwards):
                batch = tiny_batch(self.name, seed=step * self.backwards + number)
                if self.precision == "bfloat16" and "pixel_values" in batch:
                    batch["pixel_values"] = batch["pixel_values"].to(torch.bfloat16)
                with (
                    torch.autocast("cpu", torch.bfloat16) if self.precision == "autocast" else contextlib.nullcontext()
                ):
                    loss = self.model(**batch).loss
                (loss / self.backwards).backward()
                self.losses.append(loss.item())
            if self.clipped:
                parameters = list(self.model.parameters())
                clip = nn.utils.clip_grad_norm_
                norm = clip(parameters, 0.1) if self.session is None else self.session.clip_grad_norm_(0.1)
                self.norms.append(norm.item())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return self

    def save(self, path):
        parts = (
            self.model.state_dict(),
            self.optimizer.state_dict(),
            self.scheduler.state_dict(),
            torch.get_rng_state(),
        )
        torch.save(parts, path)

    def load(self, path):
        model, optimizer, scheduler, random = torch.load(path, weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(scheduler)
        torch.set_rng_state(random)
        return self

    def results(self):
        return {"weights": self.model.state_dict(), "state": self.optimizer.state_dict()}


def assert_same(one, other, where=""):
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}.{place}")
    else:
        assert one == other, where


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(each, id=label(each), marks=() if in_the_suite(number) else pytest.mark.full)
        for number, each in enumerate(COMBINATIONS)
    ],
)
def test_a_run_and_a_resumed_run_have_the_bits_of_the_run_in_memory(combination, tmp_path):
    place = combination[2]
    expected = Training(combination, "none", tmp_path).run(0, STEPS)
    streamed = Training(combination, place, tmp_path).run(0, STEPS // 2)
    streamed.save(tmp_path / "half_way.pt")
    streamed.run(STEPS // 2, STEPS)
    moved = [record for record in streaming_of(streamed.optimizer).records if record.state_bytes]
    assert moved
    assert (streamed.losses, streamed.norms) == (expected.losses, expected.norms)
    assert_same(expected.results(), streamed.results())
    resumed = Training(combination, place, tmp_path).load(tmp_path / "half_way.pt").run(STEPS // 2, STEPS)
    assert_same(expected.results(), resumed.results())
