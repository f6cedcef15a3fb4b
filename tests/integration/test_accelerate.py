"""OffloadPlugin in loops written with Accelerator, and Accelerators that a script makes without knowing of it."""

import copy
import gc
import logging
import os
import pickle
import weakref

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from transformers import TrainingArguments

from hf_offload import OffloadConfig, OffloadConfigError, OffloadPlugin, OffloadTrainingArguments, attach
from hf_offload.integrations.accelerate import attached_accelerators
from hf_offload.run import switch_on
from hf_offload.session import attached_session
from tests.helpers.tiny_models import ExampleDataset, hooks_on, tiny_batch, tiny_model, weights
from tests.helpers.train import same
from tests.helpers.trainers import make_trainer

METHODS = dict(vars(Accelerator))


@pytest.fixture(autouse=True)
def every_accelerator_is_let_go():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    for offloaded in attached_accelerators():
        offloaded.detach()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def plugin(tmp_path):
    return OffloadPlugin(tier="ssd", directory=tmp_path, min_bytes=0)


def session_of(accelerator):
    (session,) = [s for one in attached_accelerators() if one._accelerator() is accelerator for s in one.sessions]
    session.end_pending_step()
    return session


def loop(accelerator, prepare, steps=4, after_step=lambda step: None, dropout=0.1):
    """Losses, final weights and the model of a training written as accelerate's documentation has it."""
    torch.manual_seed(0)
    model = tiny_model("gpt2", dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = torch.utils.data.DataLoader(ExampleDataset("gpt2", 2 * steps), batch_size=2)
    prepared, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)
    losses = []
    for step, inputs in enumerate(loader):
        with accelerator.accumulate(prepared):
            loss = prepared(**inputs).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        after_step(step)
    return losses, weights(model), model


def together(accelerator, *objects):
    return accelerator.prepare(*objects)


def one_by_one(accelerator, *objects):
    return [accelerator.prepare(one) for one in objects]


def backwards(accelerator, *objects):
    return [accelerator.prepare(one) for one in objects[::-1]][::-1]


def by_their_own_methods(accelerator, model, optimizer, loader, scheduler):
    return (
        accelerator.prepare_model(model),
        accelerator.prepare_optimizer(optimizer),
        accelerator.prepare_data_loader(loader),
        accelerator.prepare_scheduler(scheduler),
    )


PREPARE = [together, one_by_one, backwards, by_their_own_methods]
SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
    "compiled": {"dynamo_backend": "eager"},
}
STREAMED = {"tier": "none", "optimizer": "ssd"}
# Every way to prepare without settings, and all settings prepared together.
LOOPS = [
    *(("plain", prepare, {}) for prepare in PREPARE),
    ("plain", backwards, STREAMED),
    ("accumulation", together, {}),
    ("accumulation", together, STREAMED),
    ("bf16", together, {}),
    ("bf16", by_their_own_methods, STREAMED),
    ("compiled", together, {}),
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile's own
@pytest.mark.parametrize(("name", "prepare", "offloading"), LOOPS)
def test_a_loop_computes_the_same_bits(name, prepare, offloading, tmp_path):
    settings = SETTINGS[name]
    expected = loop(Accelerator(cpu=True, **settings), prepare)
    plugin = OffloadPlugin(**{"tier": "ssd", "directory": tmp_path, "min_bytes": 0, **offloading})
    accelerator = plugin.accelerator(cpu=True, **settings)
    found = loop(accelerator, prepare)
    assert same(expected[:2], found[:2])
    stats = session_of(accelerator).stats
    if offloading:
        assert all(stats.accounts[name]["ssd"].written_bytes > 0 for name in ("optimizer state", "gradients"))
    else:
        assert stats.total.offloaded_bytes > 0
        assert stats.ended_steps == 4 // settings.get("gradient_accumulation_steps", 1)  # optimizers end steps


def test_a_run_that_is_saved_loaded_and_continued_goes_on_as_if_nothing_had_happened(tmp_path):
    expected = loop(Accelerator(cpu=True), together, steps=6, dropout=0.0)
    settings = {"tier": "ssd", "directory": tmp_path, "min_bytes": 0, "optimizer": "ssd"}
    accelerator = OffloadPlugin(**settings).accelerator(cpu=True)

    def save(step):
        if step == 1:
            accelerator.save_state(str(tmp_path / "state"))

    found = loop(accelerator, together, steps=6, after_step=save, dropout=0.0)
    assert found[0] == expected[0]

    def prepare_and_load(accelerator, *objects):
        model, optimizer, loader, scheduler = accelerator.prepare(*objects)
        accelerator.load_state(str(tmp_path / "state"))
        return model, optimizer, accelerator.skip_first_batches(loader, 2), scheduler

    for again in (OffloadPlugin(**settings).accelerator(cpu=True), Accelerator(cpu=True)):
        resumed = loop(again, prepare_and_load, steps=6, dropout=0.0)
        assert same([expected[0][2:], expected[1]], [resumed[0], resumed[1]])


def test_attaching_after_prepare(plugin):
    accelerator = Accelerator(cpu=True)

    def prepare(accelerator, *objects):
        prepared = accelerator.prepare(*objects)
        plugin.attach(accelerator)
        return prepared

    assert loop(accelerator, prepare)[0] == loop(Accelerator(cpu=True), together)[0]
    assert session_of(accelerator).stats.ended_steps == 4


def test_an_unwrapped_model_is_the_script_s_own(plugin):
    accelerator = plugin.accelerator(cpu=True, mixed_precision="bf16")
    model = tiny_model("gpt2")
    prepared = accelerator.prepare(model)
    assert accelerator.unwrap_model(prepared) is model
    state = accelerator.get_state_dict(prepared)
    assert state.keys() == tiny_model("gpt2").state_dict().keys()


def test_two_models_of_one_accelerator(plugin):
    accelerator = plugin.accelerator(cpu=True)
    models = [accelerator.prepare(tiny_model(name)) for name in ("gpt2", "bert")]
    for name, model in zip(("gpt2", "bert"), models, strict=True):
        accelerator.backward(model(**tiny_batch(name)).loss)
    (offloaded,) = attached_accelerators()
    assert [session.stats.total.offloaded_bytes > 0 for session in offloaded.sessions] == [True, True]
    assert offloaded.offloaded_models == 2


def test_a_model_for_evaluation_is_left_alone(plugin):
    accelerator = plugin.accelerator(cpu=True)
    model = accelerator.prepare_model(tiny_model("gpt2"), evaluation_mode=True)
    assert hooks_on(model) == []
    assert hooks_on(accelerator.prepare_model(tiny_model("gpt2"), None, True)) == []


@pytest.mark.parametrize("how", ["detach", "end_training"])
def test_nothing_is_left(how, plugin, caplog):
    accelerator = Accelerator(cpu=True)
    before, environment = dict(vars(accelerator)), dict(os.environ)
    offloaded = plugin.attach(accelerator)
    *_, model = loop(accelerator, together)
    (optimizer,) = accelerator._optimizers
    assert hooks_on(model)
    assert optimizer.optimizer._optimizer_step_post_hooks
    with caplog.at_level(logging.INFO, "hf_offload"):
        getattr(offloaded if how == "detach" else accelerator, how)()
    assert ("of activations moved a step" in caplog.text) == (how == "end_training")
    assert hooks_on(model) == []
    assert not optimizer.optimizer._optimizer_step_post_hooks
    assert vars(accelerator).keys() == before.keys()
    assert dict(vars(Accelerator)) == METHODS
    assert dict(os.environ) == environment
    assert attached_accelerators() == []
    assert attached_session(model) is None
    offloaded.detach()  # again


def test_what_the_accelerator_forgets_is_let_go(plugin):
    accelerator = plugin.accelerator(cpu=True)
    *_, model = loop(accelerator, together)
    (optimizer,) = accelerator._optimizers
    accelerator.free_memory()
    assert hooks_on(model) == []
    assert not optimizer.optimizer._optimizer_step_post_hooks
    *_, another = loop(accelerator, together)
    assert hooks_on(another)
    accelerator.clear()
    assert hooks_on(another) == []


def test_optimizers_are_still_pickled(plugin):
    accelerator = plugin.accelerator(cpu=True)
    loop(accelerator, together)
    (optimizer,) = accelerator._optimizers
    copy = pickle.loads(pickle.dumps(optimizer.optimizer))
    for hook in copy._optimizer_step_post_hooks.values():
        hook(copy, (), {})
    assert session_of(accelerator).stats.ended_steps == 4


def test_accelerators_go_without_the_garbage_collector(plugin):
    accelerator = plugin.accelerator(cpu=True)
    _ = loop(accelerator, together)
    gone = weakref.ref(accelerator)
    gc.disable()
    try:
        del accelerator
        assert gone() is None
    finally:
        gc.enable()


class Own(Accelerator):
    """A script's own, with a method of its own around one of accelerate's."""

    def prepare(self, *objects):
        self.asked = [type(one).__name__ for one in objects]
        return super().prepare(*objects)


@pytest.mark.parametrize("kind", [Accelerator, Own])
def test_one_accelerator_gets_other_methods_and_its_class_stays(kind, plugin):
    accelerator, other = kind(cpu=True), kind(cpu=True)
    offloaded = plugin.attach(accelerator)
    assert dict(vars(Accelerator)) == METHODS
    assert isinstance(accelerator, kind)
    assert type(accelerator).__name__ == kind.__name__
    assert type(other) is type(copy.copy(accelerator)) is kind
    prepared = accelerator.prepare(tiny_model("gpt2"))
    assert hooks_on(prepared)
    assert getattr(accelerator, "asked", ["GPT2LMHeadModel"]) == ["GPT2LMHeadModel"]
    offloaded.detach()
    assert type(accelerator) is kind
    assert hooks_on(prepared) == []


def test_what_somebody_else_put_around_a_method_comes_back(plugin):
    accelerator = Accelerator(cpu=True)
    own = accelerator.prepare
    accelerator.prepare = lambda *objects: own(*objects)
    theirs = accelerator.prepare
    offloaded = plugin.attach(accelerator)
    assert loop(accelerator, together)[0] == loop(Accelerator(cpu=True), together)[0]
    assert offloaded.offloaded_models == 1
    offloaded.detach()
    assert accelerator.prepare is theirs
    assert own.__func__ is Accelerator.prepare


def test_accelerators_are_still_pickled(plugin):
    accelerator = plugin.accelerator(cpu=True)
    twin = pickle.loads(pickle.dumps(accelerator))
    assert hooks_on(twin.prepare(tiny_model("gpt2"))) == []
    assert hooks_on(accelerator.prepare(tiny_model("gpt2")))


# -------------------------------------------------------------------------------------------------------------- settings


def test_variables_are_the_defaults_and_the_script_goes_before(monkeypatch, caplog):
    monkeypatch.setenv("HF_OFFLOAD_TIER", "ram")
    monkeypatch.setenv("HF_OFFLOAD_RAM_BUDGET", "1GiB")
    plugin = OffloadPlugin(ram_budget="2GiB", min_bytes=7)
    assert plugin.config == OffloadConfig(tier="ram", ram_budget="2GiB", min_bytes=7)
    assert "HF_OFFLOAD_RAM_BUDGET=1GiB is not used: the script sets ram_budget='2GiB'." in caplog.text


def test_two_plugins_are_refused(plugin):
    accelerator = plugin.accelerator(cpu=True)
    with pytest.raises(OffloadConfigError, match="already offloads"):
        plugin.attach(accelerator)
    assert len(attached_accelerators()) == 1


def test_a_plugin_and_training_arguments_are_refused(plugin, tmp_path):
    settings = {"offload": "ssd", "offload_directory": str(tmp_path)}
    trainer = make_trainer(tmp_path, tiny_model("gpt2"), name="gpt2", **settings)
    plugin.attach(trainer.accelerator)
    with pytest.raises(OffloadConfigError, match=r"by an OffloadPlugin, and the Trainer's OffloadCallback attaches"):
        trainer.train()


@pytest.mark.parametrize(
    ("kind", "part"), [(DistributedType.MEGATRON_LM, "Megatron-LM runs"), (DistributedType.XLA, "XLA devices")]
)
def test_what_cannot_be_offloaded_is_refused_by_name(kind, part, plugin, monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(OffloadConfigError, match=part):
        plugin.attach(accelerator)
    assert attached_accelerators() == []


def test_offloading_of_fsdp2_is_refused_by_name(plugin, tmp_path):
    """``activation_checkpointing_offload=True`` does this to every layer."""
    model = tiny_model("gpt2")
    model.transformer.h[0] = offload_wrapper(checkpoint_wrapper(model.transformer.h[0]))
    with pytest.raises(OffloadConfigError, match=r"^transformer\.h\.0 is in .*activation_checkpointing_offload=False"):
        plugin.accelerator(cpu=True).prepare(model)
    attach(model, OffloadConfig(tier="none", optimizer="ssd", directory=tmp_path, min_bytes=1)).detach()


def test_evaluation_between_steps_of_a_loop_is_not_planned_for(tmp_path, machine_with_drive):
    """Optimizers end steps here, and the next forward of training comes after the evaluation."""
    machine_with_drive(1e9)

    def run(evaluates):
        plugin = OffloadPlugin(tier="auto", directory=tmp_path, memory_budget="8MiB", min_bytes=64)
        accelerator = plugin.accelerator(cpu=True)

        def after_step(step):
            model = accelerator._models[0]
            if evaluates:
                model.eval()
                with torch.no_grad():
                    model(**{name: value.repeat(64, 1) for name, value in tiny_batch("gpt2").items()})
                model.train()

        found = loop(accelerator, together, after_step=after_step)
        session = session_of(accelerator)
        return found, session.most_measured_bytes

    (expected, without), (found, during) = run(False), run(True)
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())
    assert during == pytest.approx(without, rel=0.05)


# --------------------------------------------------------------------------------- scripts that know nothing of offloading


@pytest.fixture
def switched(plugin):
    original = Accelerator.__init__
    switch = switch_on(plugin.config)
    yield switch
    switch.off()
    assert Accelerator.__init__ is original


def test_every_accelerator_offloads(switched):
    accelerator = Accelerator(cpu=True)
    found = loop(accelerator, together)
    assert session_of(accelerator).stats.total.offloaded_bytes > 0
    assert switched.offloaded_models == 1
    switched.off()
    assert hooks_on(found[2]) == []
    assert found[0] == loop(Accelerator(cpu=True), together)[0]
    assert hooks_on(accelerator._models[0]) == []


def trained(tmp_path, arguments=TrainingArguments, **settings):
    trainer = make_trainer(tmp_path / "out", tiny_model("gpt2"), name="gpt2", arguments=arguments, seed=3, **settings)
    trainer.train()
    return weights(trainer.model)


def test_trainers_of_scripts_that_know_nothing(plugin, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "auto_find_batch_size": True}
    expected = trained(tmp_path, **settings)
    switch = switch_on(plugin.config)
    found = trained(tmp_path, **settings)
    switch.off()
    assert switch.offloaded_models == 1
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_training_arguments_go_before_the_environment(switched, tmp_path, caplog):
    trained(tmp_path, OffloadTrainingArguments, offload="ssd", offload_directory=str(tmp_path), offload_min_bytes="64")
    assert "the Trainer's OffloadCallback is used for GPT2LMHeadModel instead of the environment's" in caplog.text


def test_a_script_s_own_plugin_goes_before_the_environment(switched, tmp_path, caplog):
    own = OffloadPlugin(tier="ssd", directory=tmp_path, min_bytes=64)
    accelerator = Accelerator(cpu=True)
    own.attach(accelerator)
    loop(accelerator, together)
    assert "an OffloadPlugin is used for this Accelerator instead of the environment's" in caplog.text
    assert session_of(accelerator).config.min_bytes == 64


def test_a_model_that_the_script_offloads_itself_is_left_to_it(switched, plugin):
    model = tiny_model("gpt2")
    session = attach(model, plugin.config)
    Accelerator(cpu=True).prepare(model)
    assert attached_session(model) is session
    assert switched.offloaded_models == 0
    session.detach()
