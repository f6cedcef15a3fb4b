"""Where backward updates weights, what looks at gradients or options before the step has the bits of a run in memory, or an
error.
"""

import pytest
import torch
import transformers

from hf_offload import OffloadConfig, attach
from hf_offload.errors import OffloadError
from tests.helpers.tiny_models import tiny_model
from tests.helpers.trainers import make_trainer

TOKENS = 16


def halve(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


class Halves(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        halve(model.parameters())


class ReadsLate(transformers.TrainerCallback):
    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found = [*getattr(self, "found", ()), *[float(one.grad.norm()) for one in model.parameters()]]


class LowersRate(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


class HalvesItself(transformers.Trainer):
    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        halve(model.parameters())
        return loss


def of_an_instance():
    callback = transformers.TrainerCallback()
    callback.on_pre_optimizer_step = lambda args, state, control, model=None, **kwargs: halve(model.parameters())
    return callback


class Changed(transformers.TrainerCallback):
    """Changes the Trainer before it trains."""

    def __init__(self, change):
        self.change = change

    def on_train_begin(self, args, state, control, **kwargs):
        self.change(self.trainer)


def step_of_the_object(trainer):
    step = trainer.training_step

    def halving(model, *args, **kwargs):
        loss = step(model, *args, **kwargs)
        halve(model.parameters())
        return loss

    trainer.training_step = halving


def hook_of_the_optimizer(trainer):
    optimizer = trainer.optimizer.optimizer
    optimizer.register_step_pre_hook(lambda *_: halve(optimizer.param_groups[0]["params"]))


def hook_behind_the_step(trainer):
    optimizer = trainer.optimizer.optimizer
    weight = optimizer.param_groups[0]["params"][0]

    def add(*_):
        with torch.no_grad():
            weight.add_(weight.grad, alpha=0.1)

    optimizer.register_step_post_hook(add)


def hooks_of_weights(trainer):
    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: halve([parameter]))


class GoesBackTwice(transformers.Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        self.accelerator.backward(super().compute_loss(model, inputs, *args, **kwargs))
        return super().compute_loss(model, inputs, *args, **kwargs)


class GoesBackItself(transformers.TrainerCallback):
    """Between two steps, and its gradients are dropped, or are part of the next step's."""

    drops = True

    def on_step_end(self, args, state, control, model=None, **kwargs):
        tokens = torch.arange(TOKENS)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        self.found = [*getattr(self, "found", ()), *[float(one.grad.norm()) for one in model.parameters()]]
        if self.drops:
            model.zero_grad()


class AddsToTheNextStep(GoesBackItself):
    drops = False


class TrainsAnotherModule(transformers.Trainer):
    """Whose gradients add up, for the Trainer drops those of its model."""

    def create_optimizer(self, *args, **kwargs):
        optimizer = super().create_optimizer(*args, **kwargs)
        torch.manual_seed(0)
        self.head = torch.nn.Linear(32, 32)
        optimizer.add_param_group({"params": list(self.head.parameters()), "lr": 1e-2})
        return optimizer

    def compute_loss(self, model, inputs, *args, **kwargs):
        output = model(**inputs, output_hidden_states=True)
        return output.loss + self.head(output.hidden_states[-1]).square().mean()


class AddsLate(transformers.TrainerCallback):
    def __init__(self, added):
        self.added = added

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.trainer.add_callback(self.added())


def trained(tmp_path, place, kind=transformers.Trainer, callback=None):
    trainer = make_trainer(
        tmp_path / place, tiny_model("gpt2"), name="gpt2", kind=kind, max_grad_norm=0.0, logging_steps=1, offload="none",
        offload_optimizer=place, offload_min_bytes=512,
        **({} if place == "none" else {"offload_directory": str(tmp_path)}),
    )  # fmt: skip
    if callback is not None:
        callback.trainer = trainer
        trainer.add_callback(callback)
    trainer.train()
    return [one["loss"] for one in trainer.state.log_history if "loss" in one], list(trainer.model.parameters())


WAYS = {
    "callback": (transformers.Trainer, Halves),
    "reads late": (transformers.Trainer, ReadsLate),
    "rate": (transformers.Trainer, LowersRate),
    "training_step": (HalvesItself, lambda: None),
    "own backward": (transformers.Trainer, GoesBackItself),
    "part of the next step": (transformers.Trainer, AddsToTheNextStep),
    "instance": (transformers.Trainer, of_an_instance),
    "training_step of the object": (transformers.Trainer, lambda: Changed(step_of_the_object)),
    "hook of the optimizer": (transformers.Trainer, lambda: Changed(hook_of_the_optimizer)),
    "hook behind the step": (transformers.Trainer, lambda: Changed(hook_behind_the_step)),
    "hooks of weights": (transformers.Trainer, lambda: Changed(hooks_of_weights)),
    "two backwards": (GoesBackTwice, lambda: None),
    "another module": (TrainsAnotherModule, lambda: None),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_whose_code_acts_before_the_step_has_the_bits_of_the_run_in_memory(way, tmp_path):
    kind, callback = WAYS[way]
    plain, other = callback(), callback()
    losses, weights = trained(tmp_path, "none", kind, plain)
    found, streamed = trained(tmp_path, "ssd", kind, other)
    assert found == losses
    assert all(map(torch.equal, streamed, weights))
    assert getattr(other, "found", None) == getattr(plain, "found", None)


@pytest.mark.parametrize("added", [Halves, LowersRate, of_an_instance])
def test_a_callback_that_comes_while_weights_are_updated_in_backward_has_the_bits_of_the_run_in_memory(added, tmp_path):
    losses, weights = trained(tmp_path, "none", callback=AddsLate(added))
    found, streamed = trained(tmp_path, "ssd", callback=AddsLate(added))
    assert found == losses
    assert all(map(torch.equal, streamed, weights))


def assign(optimizer, weight):
    weight.grad = torch.zeros_like(weight)


def rate(optimizer, weight):
    optimizer.param_groups[0]["lr"] *= 2


def rate_in_place(optimizer, weight):
    optimizer.param_groups[0]["lr"].mul_(2)


def decay(optimizer, weight):
    optimizer.param_groups[0]["weight_decay"] = 0.5


def of_a_tensor(model):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))


def of_a_number(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("act", "make"),
    [
        (assign, of_a_number), (rate, of_a_number), (decay, of_a_number), (rate_in_place, of_a_tensor),
    ],
)  # fmt: skip
def test_a_loop_that_promised_not_to_and_acts_before_the_step_ends_in_an_error(act, make, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
    session = attach(model, OffloadConfig(tier="none", optimizer="ssd", min_bytes=512, directory=tmp_path))
    optimizer = session.prepare_optimizer(make(model))
    session.update_in_backward(True)
    weight = model[0].weight
    for _ in range(2):
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(4, 32)).square().mean().backward()
    with pytest.raises(OffloadError, match=r"max_grad_norm(=1e9)?, which"):
        act(optimizer, weight)
        optimizer.step()
