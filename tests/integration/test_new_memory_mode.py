"""A memory mode of one class and one line of the registry: every surface knows it."""

import inspect
import json
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from torch import nn

from hf_offload import OffloadConfigError, OffloadTrainingArguments
from hf_offload.methods.param_groups import WeightDecay, decay_groups
from hf_offload.methods.protocol import MemoryMode, trained_parameters
from hf_offload.settings.classes import settings
from hf_offload.settings.memory_modes import MODES, Entry
from hf_offload.settings.values import Number
from tests.helpers.command_line import command
from tests.helpers.tiny_models import tiny_model
from tests.helpers.trainers import make_trainer
from tests.integration.test_modes_without_the_trainer import environment, plain_loop, plugin

SMALL_GPT2 = ["model.config.n_layer=2", "model.config.n_embd=64", "model.config.n_head=2"]


@settings(frozen=True, kw_only=True)
class Momentum(MemoryMode):
    """SGD with momentum."""

    momentum: Annotated[Number, Field(ge=0, le=1)] = 0.9

    def optimizer(self, model: nn.Module, *, weight_decay: WeightDecay, **adam: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(decay_groups(model, weight_decay), lr=adam["lr"], momentum=self.momentum)

    def state_bytes(self, model: nn.Module) -> int:
        return sum(one.nbytes for one in trained_parameters(model))


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(MODES, "momentum", Entry(f"{__name__}:Momentum"))
    monkeypatch.setitem(MODES, "slow_momentum", Entry(f"{__name__}:Momentum", {"momentum": 0.99}))


def invoke(*arguments):
    result = command(*arguments)
    assert result.exit_code == 0, result.output + result.stderr
    return result.stdout


def trained(folder, mode, settings=None):
    torch.manual_seed(0)
    run = make_trainer(folder, tiny_model("llama"), memory_mode=mode, memory_mode_kwargs=settings)
    run.train()
    return run.optimizer.optimizer


def test_the_training_arguments_take_it(tmp_path):
    assert isinstance(trained(tmp_path, "momentum"), torch.optim.SGD)
    found = {name: trained(tmp_path, name).param_groups[0]["momentum"] for name in ("momentum", "slow_momentum")}
    assert found == {"momentum": 0.9, "slow_momentum": 0.99}
    assert trained(tmp_path, "slow_momentum", {"momentum": 0.5}).param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize("surface", [plain_loop, plugin, environment])
def test_loops_of_scripts_have_it(surface, monkeypatch):
    made = []
    monkeypatch.setattr(Momentum, "begin_training", lambda mode, optimizer: made.append(optimizer) or (lambda: None))
    surface({"tier": "none", "memory_mode": "slow_momentum"})
    assert [(type(one), one.param_groups[0]["momentum"]) for one in made] == [(torch.optim.SGD, 0.99)]


def test_it_is_short():
    registered = 2  # lines of the registry
    assert len(inspect.getsource(Momentum).splitlines()) + registered < 40


def test_errors_name_it():
    for name, given, part in (
        ("momentu", None, "Did you mean 'momentum'"),
        ("momentum", {"momentum": 2}, "memory_mode='momentum': momentum=2 is too large: give 1 or less"),
        ("lora", {"momentum": 0.5}, "it is one of momentum, slow_momentum"),
        ("none", {"momentum": 0.5}, "mezo, momentum, slow_momentum"),
    ):
        with pytest.raises(OffloadConfigError, match=part):
            OffloadTrainingArguments("unused", memory_mode=name, memory_mode_kwargs=given)


def test_it_is_planned():
    model = ["gpt2-small", *SMALL_GPT2, "--gpu", "rtx4090", "--sequence", "128"]
    alone = json.loads(invoke("plan", *model, "--memory-mode", "momentum", "--json"))
    table = json.loads(invoke("plan", *model, "--modes", "--memory-mode", "none,momentum", "--json"))
    adamw, momentum = table["rows"]
    assert momentum["state_bytes"] == alone["optimizer_state_bytes"] == adamw["state_bytes"] // 2
