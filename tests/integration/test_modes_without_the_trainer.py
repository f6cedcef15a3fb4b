"""Memory modes where a script has made its optimizer: plain loops, OffloadPlugin, the environment."""

import itertools

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import TrainingArguments

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, OffloadPlugin, OffloadTrainingArguments, attach
from hf_offload.integrations.accelerate import attached_accelerators
from hf_offload.run import switch_on
from hf_offload.settings.environment import variables_for
from hf_offload.settings.memory_modes import memory_mode
from hf_offload.settings.recipes import load_recipe
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.train import assert_same, take_steps
from tests.helpers.trainers import make_trainer
from tests.integration.test_memory_modes import SETTINGS

STEPS = 4
MODES = ["lora", "lora_fa", "dora", "galore", "apollo_mini", "frugal", "lisa", "badam"]
LR, EPS = 1e-2, 1e-7
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft uses the older name


@pytest.fixture(autouse=True)
def accelerators_are_detached():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    for offloaded in attached_accelerators():
        offloaded.detach()
    AcceleratorState._reset_state(reset_partial_state=True)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": LR, "eps": EPS, "weight_decay": 0.0} | options)


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def trained(model):
    return [one.detach().clone() for one in model.parameters() if one.requires_grad]


def train(model, optimizer, scheduler):
    return take_steps(model, optimizer, [tiny_batch("llama", seed=step) for step in range(STEPS)], scheduler)


def directly(name, adam):
    """A model and an optimizer that the mode is asked for without a session, and what ends the training."""
    torch.manual_seed(0)
    mode = memory_mode(name, SETTINGS[name])
    model = mode.prepare(tiny_model("llama"))
    optimizer = mode.optimizer(model, **adam, weight_decay=0.0)
    return model, optimizer, mode.begin_training(optimizer)


def by_hand(name):
    model, optimizer, end = directly(name, {"lr": LR, "betas": (0.9, 0.999), "eps": EPS})
    losses = train(model, optimizer, schedule(optimizer))
    end()
    return losses, trained(model)


def plain_loop(config):
    torch.manual_seed(0)
    model = tiny_model("llama")
    optimizer = adamw(model)
    scheduler = schedule(optimizer)
    session = attach(model, OffloadConfig(**config))
    losses = train(model, session.prepare_optimizer(optimizer), scheduler)
    session.detach()
    return losses, trained(model)


def with_accelerator(accelerator):
    torch.manual_seed(0)
    model = tiny_model("llama")
    optimizer = adamw(model)
    prepared = accelerator.prepare(model, optimizer, schedule(optimizer))
    losses = train(*prepared)
    accelerator.end_training()
    return losses, trained(model)


def plugin(config):
    return with_accelerator(OffloadPlugin(**config).accelerator(cpu=True))


def environment(config):
    with pytest.MonkeyPatch.context() as patched:
        for name, value in variables_for(config).items():
            patched.setenv(name, value)
        switch = switch_on(OffloadPlugin().config)
        try:
            return with_accelerator(Accelerator(cpu=True))
        finally:
            switch.off()


SURFACES = [plain_loop, plugin, environment]


@pytest.mark.parametrize(
    ("name", "surface"),
    [*zip(MODES, itertools.cycle(SURFACES), strict=False)],
)
def test_a_scripts_own_loop_has_the_bits_of_the_mode(name, surface, tmp_path):
    expected = by_hand(name)
    config = {"memory_mode": name, "memory_mode_kwargs": SETTINGS[name]}
    offloading = {"tier": "ssd", "directory": tmp_path, "min_bytes": 0}
    weights_elsewhere = {"tier": "none", "params": "ssd", "directory": tmp_path, "min_bytes": 1}
    for asked in (config | {"tier": "none"}, config | offloading, config | weights_elsewhere):
        assert_same(surface(asked), expected)


def test_a_trainer_that_knows_nothing_of_it_has_the_bits_of_the_flag_and_resumes(tmp_path, monkeypatch):
    def run(kind, resume=None, **more):
        torch.manual_seed(0)
        settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "weight_decay": 0.1}
        trainer = make_trainer(tmp_path, tiny_model("llama"), arguments=kind, **settings, **more)
        trainer.train(resume)
        return trained(trainer.model)

    expected = run(OffloadTrainingArguments, memory_mode="galore", memory_mode_kwargs=SETTINGS["galore"])
    for name, value in variables_for({"memory_mode": "galore", "memory_mode_kwargs": SETTINGS["galore"]}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_OFFLOAD_TIER", "none")
    switch = switch_on(OffloadPlugin().config)
    try:
        for resume in (None, str(tmp_path / "checkpoint-2")):
            assert all(map(torch.equal, run(TrainingArguments, resume), expected))
    finally:
        switch.off()


@pytest.mark.parametrize("name", ["lora", "galore"])
def test_each_parameter_keeps_the_weight_decay_it_had(name):
    model = tiny_model("gpt2")
    no_decay = [one for one_name, one in model.named_parameters() if "bias" in one_name]
    others = [one for one_name, one in model.named_parameters() if "bias" not in one_name]
    groups = [{"params": others, "weight_decay": 0.5}, {"params": no_decay, "weight_decay": 0.0}]
    session = attach(model, OffloadConfig(tier="none", memory_mode=name, memory_mode_kwargs=SETTINGS[name]))
    made = session.prepare_optimizer(torch.optim.AdamW(groups))
    decays = {one: group["weight_decay"] for group in made.param_groups for one in group["params"]}
    found = {each: decays[one] for each, one in model.named_parameters() if one.requires_grad}
    session.detach()
    assert found
    for each, decay in found.items():  # GPT-2's norms among them, which a mode itself would not decay
        assert decay == (0.0 if "bias" in each else 0.5), each


def test_adapters_are_saved_by_the_model_that_the_script_holds(tmp_path):
    model = tiny_model("llama")
    session = attach(model, OffloadConfig(tier="none", memory_mode="lora", memory_mode_kwargs={"rank": 4}))
    optimizer = session.prepare_optimizer(adamw(model))
    train(model, optimizer, schedule(optimizer))
    session.detach()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").is_file()
    loaded = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    batch = tiny_batch("llama", seed=9)
    assert torch.equal(loaded.eval()(**batch).logits, model.eval()(**batch).logits)


def one_group_each(model, key, values):
    parameters = list(model.parameters())
    halves = (parameters[::2], parameters[1::2])
    return torch.optim.AdamW([{"params": each, key: value} for each, value in zip(halves, values, strict=True)])


def stepped(model):
    optimizer = adamw(model)
    model(**tiny_batch("llama", seed=0)).loss.backward()
    optimizer.step()
    return optimizer


REFUSED = [
    (stepped, {}, "its state would be lost"),
    (lambda model: torch.optim.SGD(model.parameters()), {}, "this optimizer is SGD: use an AdamW"),
    (lambda model: torch.optim.Adam(model.parameters(), weight_decay=0.1), {}, "Adam with weight_decay"),
    (lambda model: adamw(model, amsgrad=True), {}, "no amsgrad"),
    (lambda model: one_group_each(model, "lr", (0.1, 0.2)), {}, "one lr for all parameters"),
    (lambda model: torch.optim.AdamW(list(model.parameters())[1:]), {}, "are not in the optimizer"),
    (
        lambda model: torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.ones(2))]),
        {},
        "1 parameters that are not the model's",
    ),
    (adamw, {"update_in_backward": True}, "update_in_backward excludes clipping"),
]


@pytest.mark.parametrize(("make", "settings", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_cannot_be_taken_over_is_refused(make, settings, message):
    model = tiny_model("llama")
    given = make(model)
    config = OffloadConfig(tier="none", memory_mode="galore", memory_mode_kwargs=SETTINGS["galore"] | settings)
    session = attach(model, config)
    with pytest.raises(OffloadConfigError, match=message):
        session.prepare_optimizer(given)
    session.detach()


def test_nothing_is_trained_without_the_modes_optimizer():
    model = tiny_model("llama")
    session = attach(model, OffloadConfig(tier="none", memory_mode="lora", memory_mode_kwargs={"rank": 4}))
    loss = model(**tiny_batch("llama", seed=0)).loss
    with pytest.raises(OffloadError, match=r"session\.prepare_optimizer"):
        loss.backward()
    session.detach()


def test_an_optimizer_without_its_model_is_refused():
    model = tiny_model("llama")
    accelerator = OffloadPlugin(tier="none", memory_mode="galore", memory_mode_kwargs={"rank": 4}).accelerator(cpu=True)
    with pytest.raises(OffloadConfigError, match="an optimizer is prepared before its model"):
        accelerator.prepare(adamw(model))


def test_a_recipe_says_its_mode_in_one_place(tiny_recipe):
    by_section = load_recipe(tiny_recipe, ["memory={mode: galore, rank: 8}"]).offload
    by_key = load_recipe(
        tiny_recipe, ["offload={tier: none, memory_mode: galore, memory_mode_kwargs: {rank: 8}}"]
    ).offload
    assert by_section == by_key
    with pytest.raises(OffloadConfigError, match="the section memory set the same"):
        load_recipe(tiny_recipe, ["memory.mode=lora", "offload={memory_mode: galore}"])


def test_a_plugin_with_a_mode_comes_before_prepare():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(tiny_model("llama"))
    with pytest.raises(OffloadConfigError, match="attach the OffloadPlugin before prepare"):
        OffloadPlugin(tier="none", memory_mode="lora").attach(accelerator)


def test_a_frozen_model_beside_the_trained_one_is_left_alone():
    teacher = tiny_model("llama").requires_grad_(False)
    accelerator = OffloadPlugin(tier="none", memory_mode="lora", memory_mode_kwargs={"rank": 4}).accelerator(cpu=True)
    accelerator.prepare(teacher)
    assert not any(one.requires_grad for one in teacher.parameters())
    teacher(**tiny_batch("llama", seed=0))
