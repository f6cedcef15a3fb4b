"""The real Trainer on tiny models: offloading changes nothing but where activations are."""

import copy
import json
import logging

import pytest
import torch
import transformers
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_offload import (
    OffloadCallback,
    OffloadConfig,
    OffloadSeq2SeqTrainingArguments,
    OffloadTrainingArguments,
)
from hf_offload.engine.transfer import Transfer
from hf_offload.integrations.summary import show_summary
from tests.helpers.tiny_models import ExampleDataset, hooks_on, tiny_batch, tiny_model, weights
from tests.helpers.train import assert_same
from tests.helpers.trainers import ALIASES, CHECKPOINTING, QUIET

TIMINGS = ("runtime", "_per_second")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Whatever a test does, it ends with no saved-tensor hooks on this thread."""
    yield
    assert no_hooks_on_this_thread()


def no_hooks_on_this_thread():
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.fixture
def plain(tmp_path):
    """Settings of a short training without anything of offloading."""
    own = {"max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "dataloader_pin_memory": False, "seed": 3}
    return {"output_dir": str(tmp_path / "out"), **QUIET, **own}


@pytest.fixture
def flags(tmp_path):
    """Those that switch offloading on, for every tensor there is."""
    directory = tmp_path / "tier"
    directory.mkdir()
    return {"offload": "ssd", "offload_directory": str(directory), "offload_min_bytes": "0"}


@pytest.fixture
def config(flags):
    return OffloadConfig(tier="ssd", directory=flags["offload_directory"], min_bytes=0)


def make_trainer(args, name="gpt2", model=None, trainer=Trainer, **kwargs):
    return trainer(
        model=tiny_model(name) if model is None else model,
        args=args,
        train_dataset=ExampleDataset(name, 24, seed=1),
        eval_dataset=ExampleDataset(name, 6, seed=2),
        **kwargs,
    )


def callback_of(trainer):
    """The one callback of ours that the trainer has."""
    (found,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, OffloadCallback)]
    return found


def history(trainer):
    """What the trainer logged, less timings and what offloading adds."""
    return [
        {
            key: value
            for key, value in entry.items()
            if not key.startswith("offload/") and not any(word in key for word in TIMINGS)
        }
        for entry in trainer.state.log_history
    ]


def assert_same_training(expected, found):
    assert any("loss" in entry for entry in history(expected))
    assert history(found) == history(expected)
    # Activation checkpointing leaves a hook of its own, with or without offloading.
    assert list(map(type, hooks_on(found.model))) == list(map(type, hooks_on(expected.model)))
    assert_same(found.model.state_dict(), expected.model.state_dict())


def assert_offloaded(trainer):
    callback = callback_of(trainer)
    assert callback.stats.total.offloaded_bytes > 0
    assert callback.stats.total.refused_bytes == 0
    assert len(callback.stats.steps) == trainer.state.global_step
    assert all(step.offloaded_bytes > 0 for step in callback.stats.steps)
    assert callback.session is None
    assert not any(type(hook).__module__.startswith("hf_offload") for hook in hooks_on(trainer.model))
    assert no_hooks_on_this_thread()


def assert_changes_nothing(plain, flags, kinds=(TrainingArguments, OffloadTrainingArguments), **options):
    """Trainings without and with ``flags`` are the same but for where activations are. Returns both."""
    trainers = []
    for kind, more in zip(kinds, ({}, flags), strict=True):
        trainers.append(make_trainer(kind(**plain, **more), **options))  # which draws the weights
        trainers[-1].train()
    assert_same_training(*trainers)
    assert_offloaded(trainers[1])
    return trainers


# -- the surfaces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_the_argument_alone(name, plain, flags):
    assert_changes_nothing(plain, flags, name=name)


def test_a_callback_with_and_without_a_config(plain, config):
    expected = make_trainer(TrainingArguments(**plain))
    expected.train()
    found = make_trainer(OffloadTrainingArguments(**plain), callbacks=[OffloadCallback(config)])
    found.train()
    assert_same_training(expected, found)
    assert_offloaded(found)
    nothing = make_trainer(TrainingArguments(**plain), callbacks=[OffloadCallback()])
    nothing.train()
    assert_same_training(expected, nothing)
    assert callback_of(nothing).stats is None


def test_seq2seq_with_generation_in_the_middle(plain, flags):
    plain |= {"eval_strategy": "steps", "eval_steps": 2, "predict_with_generate": True, "generation_max_length": 8}
    generated = []

    def measure(prediction):
        generated.append(prediction.predictions.tolist())
        return {"tokens": float((prediction.predictions > 0).sum())}

    kinds = (Seq2SeqTrainingArguments, OffloadSeq2SeqTrainingArguments)
    assert_changes_nothing(plain, flags, kinds=kinds, name="t5", trainer=Seq2SeqTrainer, compute_metrics=measure)
    assert len(generated) == 4
    assert generated[:2] == generated[2:]


# -- what trainings do -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 3, "bf16": True, "eval_strategy": "steps", "eval_steps": 2},
        {"label_smoothing_factor": 0.1},  # a loss outside of the model
        {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}},
        {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}},
    ],
    ids=["accumulation, bf16, evaluation", "label smoothing", "checkpointing", "reentrant checkpointing"],
)
def test_settings_of_the_trainer(settings, plain, flags):
    _, found = assert_changes_nothing(plain | settings, flags)
    assert any("eval_loss" in entry for entry in history(found)) == ("eval_strategy" in settings)


def test_auto_find_batch_size(plain, flags):
    """The second begin of the training, with a smaller batch, finds the first one's session and replaces it."""

    def trained(args):
        trainer = make_trainer(args)
        sizes = []

        def refuse(module, inputs):
            sizes.append(len(inputs[0]))
            if sizes[-1] > 3:
                raise RuntimeError("CUDA out of memory.")

        handle = trainer.model.transformer.wte.register_forward_pre_hook(refuse)
        trainer.train()
        handle.remove()
        assert sizes[0] == 4
        assert sizes[-1] < 4
        return trainer

    plain |= {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    expected = trained(TrainingArguments(**plain))
    found = trained(OffloadTrainingArguments(**plain, **flags))
    assert_same_training(expected, found)
    assert_offloaded(found)


def stumbling(error):
    """A hook that raises when it is called the second time."""
    calls = []

    def stumble(*_):
        calls.append(1)
        if len(calls) == 2:
            raise error("stumbled")

    return stumble


@pytest.mark.parametrize(("error", "where"), [(RuntimeError, "forward"), (KeyboardInterrupt, "between")])
def test_training_again_after_an_exception(error, where, plain, flags):
    def trained(args):
        trainer = make_trainer(args)
        stumble = stumbling(error)
        if where == "forward":
            trainer.model.transformer.h[1].register_forward_pre_hook(stumble)
        else:
            trainer.create_optimizer()
            trainer.optimizer.register_step_pre_hook(stumble)
        with pytest.raises(error, match="stumbled"):
            trainer.train()
        trainer.train()
        return trainer

    expected = trained(TrainingArguments(**plain))
    found = trained(OffloadTrainingArguments(**plain, **flags))
    assert_same_training(expected, found)
    assert_offloaded(found)


def test_another_trainer_after_an_interrupted_one(plain, flags):
    """What running a notebook's cell again does."""
    model = tiny_model("gpt2")
    handle = model.transformer.h[1].register_forward_pre_hook(stumbling(KeyboardInterrupt))
    first = make_trainer(OffloadTrainingArguments(**plain, **flags), model=model)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    handle.remove()
    try:
        second = make_trainer(OffloadTrainingArguments(**plain, **flags), model=model)
        second.train()
        assert_offloaded(second)
        assert hooks_on(model) == []
    finally:
        while not no_hooks_on_this_thread():
            torch._C._autograd._pop_saved_tensors_default_hooks()


# -- what is written -------------------------------------------------------------------------------------------------------


class CopiesItsTrainer(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.copied = copy.deepcopy(self.trainer)


def test_a_trainer_is_copied_with_the_counts_so_far_while_it_trains_and_afterwards(plain, flags):
    trainer = make_trainer(OffloadTrainingArguments(**plain, **flags))
    copies = CopiesItsTrainer()
    trainer.add_callback(copies)
    copies.trainer = trainer
    trainer.train()
    without = make_trainer(TrainingArguments(**plain))
    without.train()
    again, expected = copy.deepcopy(trainer), copy.deepcopy(without)
    stats, early = callback_of(trainer).stats, callback_of(copies.copied)
    assert early.session is None
    assert 0 < early.stats.total.offloaded_bytes < stats.total.offloaded_bytes
    before = stats.total
    assert callback_of(again).stats.total == before
    for each in (expected, again):
        torch.manual_seed(1)
        each.train()
    assert_same_training(expected, again)
    assert stats.total == before


def test_the_log_history_has_the_counters(plain, flags):
    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    plain |= {"eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(OffloadTrainingArguments(**plain, **flags), callbacks=[Reporter()])
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 4
    steps = list(callback_of(trainer).stats.steps)
    for entry, step in zip(entries, steps, strict=True):
        assert {key for key in entry if key.startswith("offload/")} == {
            "offload/moved_gib", "offload/waited_s", "offload/peak_gib", "offload/drive_written_gib",
        }  # fmt: skip
        for name, value in (("moved_gib", step.offloaded_bytes), ("peak_gib", step.peak_resident_bytes)):
            assert entry[f"offload/{name}"] * 2**30 == pytest.approx(value, rel=1e-3)
            assert value > 0
        assert entry["offload/waited_s"] == pytest.approx(step.stall_s, rel=1e-3)
    written = [entry["offload/drive_written_gib"] for entry in entries]
    assert 0 < written[-1] * 2**30 <= 1.001 * sum(step.written_bytes for step in steps)
    assert written == sorted(written)
    assert [entry for entry in seen if "loss" in entry] == [
        {key: value for key, value in entry.items() if key != "step"} for entry in entries
    ]
    others = [entry for entry in trainer.state.log_history if "loss" not in entry]
    assert others
    assert not any(key.startswith("offload/") for entry in others for key in entry)
    assert json.loads(json.dumps(trainer.state.log_history)) == trainer.state.log_history


def test_a_saved_model_needs_none_of_this_package(plain, flags, tmp_path):
    plain |= {"save_strategy": "steps", "save_steps": 4}
    trainer = make_trainer(OffloadTrainingArguments(**plain, **flags))
    trainer.train()
    checkpoint = tmp_path / "out" / "checkpoint-4"
    for path in checkpoint.iterdir():
        if path.name not in ("training_args.bin", "trainer_state.json"):  # the latter has the counters
            assert b"offload" not in path.read_bytes(), path.name
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(checkpoint).state_dict(), trainer.model.state_dict())


# -- the model while offloading is attached --------------------------------------------------------------------------------


def test_a_frozen_model_is_left_alone_with_a_warning(plain, flags, caplog):
    trainer = make_trainer(OffloadTrainingArguments(**plain, **flags))
    trainer.model.requires_grad_(False)
    callback = callback_of(trainer)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    assert not callback.session.active
    assert hooks_on(trainer.model) == []
    assert "GPT2LMHeadModel" in caplog.text
    assert "nothing to offload" in caplog.text
    trainer.model(**tiny_batch("gpt2"))
    callback.on_step_end(trainer.args, trainer.state, trainer.control)
    callback.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": 1.0})
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert callback.stats.total.offloaded_bytes == 0


@pytest.mark.parametrize("shown", ["WARNING", "INFO"])
def test_the_summary_is_shown_once_whatever_the_level(shown, plain, flags, caplog):
    caplog.set_level(shown, "hf_offload")
    make_trainer(OffloadTrainingArguments(**plain, **flags)).train()
    lines = [one for one in caplog.records if one.getMessage().startswith(("Offloading: ", "Plan: ", "Drive "))]
    assert [one.levelname for one in lines] == [shown] * len(lines)
    assert 1 <= len(lines) <= 4
    assert sum("of activations moved a step" in one.getMessage() for one in lines) == 1


def test_a_summary_has_four_lines_however_many_drives(caplog):
    lines = [f"line {number}." for number in range(7)]
    show_summary(lines, logging.getLogger("hf_offload.tests"))
    found = [one.getMessage() for one in caplog.records]
    assert len(found) == 4
    assert " ".join(found) == " ".join(lines)


def test_the_environment_switches_everything_off(plain, flags, tmp_path, monkeypatch, caplog):
    expected = make_trainer(TrainingArguments(**plain))
    expected.train()
    monkeypatch.setenv("HF_OFFLOAD_DISABLE", "1")
    found = make_trainer(OffloadTrainingArguments(**plain, **flags))
    found.train()
    assert_same_training(expected, found)
    assert callback_of(found).stats.total.offloaded_bytes == 0
    assert "HF_OFFLOAD_DISABLE" in caplog.text
    assert list((tmp_path / "tier").iterdir()) == []
    assert not any(key.startswith("offload/") for entry in found.state.log_history for key in entry)


# -- adapters --------------------------------------------------------------------------------------------------------------


@ALIASES
def test_lora_moves_no_frozen_weight(plain, flags, monkeypatch):
    peft = pytest.importorskip("peft")
    stored = set()
    adopt = Transfer.adopt

    def spying(self, record):
        stored.add(record.buffer.numpy().tobytes())
        adopt(self, record)

    def adapted():
        torch.manual_seed(5)
        settings = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False)
        return peft.get_peft_model(tiny_model("llama"), settings)

    expected = make_trainer(TrainingArguments(**plain), "llama", adapted())
    expected.train()
    monkeypatch.setattr(Transfer, "adopt", spying)
    model = adapted()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    found = make_trainer(OffloadTrainingArguments(**plain, **flags), "llama", model)
    found.train()
    assert_same_training(expected, found)
    assert_offloaded(found)
    assert len(stored) > 20
    assert len(frozen) > 10
    after = weights(model)
    for name, weight in frozen.items():
        assert torch.equal(after[name], weight)
        assert weight.numpy().tobytes() not in stored, name
