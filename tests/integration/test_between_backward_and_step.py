"""Updates in backward by promise: a Trainer refuses what needs gradients, and a loop that uses them ends in an error."""

import pytest
import torch

from hf_offload import OffloadConfig, OffloadConfigError, attach
from hf_offload.errors import OffloadError
from hf_offload.integrations.trainer import OffloadCallback
from tests.helpers.tiny_models import tiny_model
from tests.helpers.train import assert_same
from tests.helpers.trainers import make_trainer


def trainer_in(folder, **arguments):
    return make_trainer(folder / "run", tiny_model("gpt2"), name="gpt2", logging_steps=1, **arguments)


def test_gradients_of_a_trainer_that_updates_in_backward_never_leave_memory(tmp_path):
    found = []
    streams = {"offload_optimizer": "ssd", "offload_min_bytes": 512, "offload_directory": str(tmp_path)}
    for arguments in ({}, {**streams, "offload_update_in_backward": True}):
        trainer = trainer_in(tmp_path, max_grad_norm=0.0, **arguments)
        trainer.train()
        losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        found.append([losses, *trainer.model.parameters()])
    assert_same(*found)
    (callback,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, OffloadCallback))
    assert callback.stats.accounts["optimizer state"]["ssd"].written_bytes > 0
    assert callback.stats.accounts["gradients"]["ssd"].written_bytes == 0


def test_a_trainer_refuses_what_needs_gradients_after_backward(tmp_path):
    trainer = trainer_in(
        tmp_path, gradient_accumulation_steps=2, offload_optimizer="ram", offload_update_in_backward=True
    )
    with pytest.raises(OffloadConfigError, match=r"max_grad_norm=1\.0 needs(.|\n)*gradient_accumulation_steps=2 needs"):
        trainer.train()


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
    settings = {"optimizer": "ssd", "update_in_backward": True, "min_bytes": 512, "directory": tmp_path}
    session = attach(model, OffloadConfig(tier="none", **settings))
    optimizer = session.prepare_optimizer(make(model))
    weight = model[0].weight
    for _ in range(2):
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(4, 32)).square().mean().backward()
    with pytest.raises(OffloadError, match="update_in_backward"):
        act(optimizer, weight)
        optimizer.step()
