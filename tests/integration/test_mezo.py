"""The memory mode mezo in the Trainer, with accelerate, and in plain loops: the same bits, and what is refused."""

import itertools
import json

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from typer.testing import CliRunner

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, OffloadPlugin, OffloadTrainingArguments, attach
from hf_offload.cli.main import app
from hf_offload.integrations.accelerate import attached_accelerators
from hf_offload.integrations.two_losses import mezo_of
from hf_offload.methods.mezo import LOG_FILE, MezoLog, replay
from hf_offload.run import switch_on
from hf_offload.session import attached_session
from hf_offload.settings.environment import variables_for
from hf_offload.settings.memory_modes import memory_mode
from tests.helpers.tiny_models import ExampleDataset, tiny_batch, tiny_model, weights
from tests.helpers.train import same
from tests.helpers.trainers import QUIET

STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft uses the older name
SETTINGS = {"eps": 1e-2, "seed": 3}


@pytest.fixture(autouse=True)
def _accelerators_are_detached():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    for offloaded in attached_accelerators():
        offloaded.detach()
    AcceleratorState._reset_state(reset_partial_state=True)


def arguments(folder, **others):
    usual = {"max_steps": STEPS, "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0, "logging_steps": 1}
    mine = {"output_dir": str(folder), "memory_mode": "mezo", "memory_mode_kwargs": SETTINGS}
    return OffloadTrainingArguments(**QUIET | usual | mine | others)


class InOrder(Trainer):
    """Batches in the order of the data."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, self.args.train_batch_size)


def trainer(folder, model=None, kind=InOrder, name="llama", **others):
    torch.manual_seed(0)
    model = tiny_model(name) if model is None else model
    return kind(model=model, args=arguments(folder, **others), train_dataset=ExampleDataset(name, 24))


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def most_change(one, other):
    return max(float((weight - other[name]).abs().max()) for name, weight in one.items())


def by_hand(run, name="llama", micro_batches=1):
    """The schedule and decay of the Trainer ``run``, in a loop of its own. The Trainer counts what losses are divided by."""
    mode = memory_mode("mezo", SETTINGS)
    model = tiny_model(name)
    optimizer = mode.optimizer(model, lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (STEPS - step) / STEPS)
    rows = tiny_batch(name, size=24)
    for step in range(STEPS):
        parts = [
            {key: value[2 * place : 2 * place + 2] for key, value in rows.items()}
            for place in range(micro_batches * step, micro_batches * (step + 1))
        ]

        def closure(parts=parts):
            _, count = run.get_batch_samples(iter(parts), len(parts), torch.device("cpu"))
            return sum(model(**part, num_items_in_batch=count).loss for part in parts)

        optimizer.step(closure)
        scheduler.step()
    return weights(model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_trainer_has_the_bits_of_a_loop(name, tmp_path):
    run = trainer(tmp_path, name=name)
    run.train()
    assert same(weights(run.model), by_hand(run, name))
    assert len(losses(run)) == STEPS
    assert not any("grad_norm" in entry for entry in run.state.log_history)


def test_micro_batches_are_averaged_in_both_losses(tmp_path):
    run = trainer(tmp_path, gradient_accumulation_steps=2)
    run.train()
    assert same(weights(run.model), by_hand(run, micro_batches=2))
    whole = trainer(tmp_path, per_device_train_batch_size=4)
    whole.train()
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)
    gradients = [[row.gradient for row in mezo_of(one.optimizer).log.rows] for one in (run, whole)]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-2)


class Plain(InOrder):
    """Its loss knows nothing of the number of items."""

    model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("attention_mask", None)
        labels = inputs.pop("labels")
        return model(**inputs, labels=labels).loss


def test_a_loss_of_ones_own_is_averaged_too(tmp_path):
    def run(**others):
        made = trainer(tmp_path, kind=Plain, **others)
        made.model_accepts_loss_kwargs = False
        made.train()
        return losses(made)

    halves = run(gradient_accumulation_steps=2)
    assert halves == pytest.approx(run(per_device_train_batch_size=4), rel=1e-5)


@pytest.mark.parametrize(("labels", "micro_batches"), [("none", 1), ("one, shifted away", 2)])
def test_a_batch_without_labels_changes_no_weight(labels, micro_batches, tmp_path):
    """Its loss is NaN and its gradient 0: other optimizers go on, too."""
    run = trainer(tmp_path, gradient_accumulation_steps=micro_batches, weight_decay=0)
    data = [dict(row, labels=row["labels"].clone()) for row in run.train_dataset]
    of_a_step = 2 * micro_batches
    for row in data[of_a_step : 2 * of_a_step]:
        row["labels"][(0 if labels == "none" else 1) :] = -100
    run.train_dataset = data
    passed = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            passed.append(weights(model))

    run.add_callback(Look())
    run.train()
    changes = [most_change(one, other) > 1e-6 for one, other in itertools.pairwise(passed)]
    assert changes == [False, *[True] * (STEPS - 2)]  # rounding errors stay
    assert [row.gradient == 0 for row in mezo_of(run.optimizer).log.rows] == [False, True, *[False] * (STEPS - 2)]
    assert torch.tensor(losses(run)).isfinite().all()


def test_a_micro_batch_without_labels_leaves_the_others_their_part(tmp_path):
    def gradient_of(rows, **others):
        run = trainer(tmp_path, kind=Plain, max_steps=1, **others)
        run.model_accepts_loss_kwargs = False
        run.train_dataset = rows
        run.train()
        return mezo_of(run.optimizer).log.rows[0].gradient

    rows = list(ExampleDataset("llama", 4))
    for row in rows[2:]:
        row["labels"] = torch.full_like(row["labels"], -100)
    assert gradient_of(rows, gradient_accumulation_steps=2) == pytest.approx(gradient_of(rows[:2]) / 2, rel=1e-3)


def test_a_training_that_ended_within_a_step_leaves_no_micro_batch_behind(tmp_path):
    class Stop(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    run = trainer(tmp_path, gradient_accumulation_steps=2)
    stop = Stop()
    run.add_callback(stop)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.remove_callback(stop)
    run.train()
    assert same(weights(run.model), by_hand(run, micro_batches=2))


def test_it_resumes_and_the_checkpoint_has_the_log(tmp_path):
    whole = trainer(tmp_path, save_strategy="steps", save_steps=3)
    initial = weights(whole.model)
    whole.train()
    again = trainer(tmp_path, tiny_model("llama", seed=5))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(again)[3:] == losses(whole)[3:]
    assert same(weights(whole.model), weights(again.model))
    for step in (3, STEPS):
        log = MezoLog.load(tmp_path / f"checkpoint-{step}")
        assert len(log.rows) == step
        assert log.final
        rebuilt = {name: weight.clone() for name, weight in initial.items()}
        replay(log, rebuilt)
        assert step < STEPS or same(weights(whole.model), rebuilt)


@pytest.mark.parametrize("has_log", [True, False])
def test_a_checkpoint_without_the_optimizer_goes_on_with_other_directions(has_log, tmp_path, caplog):
    whole = trainer(tmp_path, save_strategy="steps", save_steps=2, save_only_model=True, lr_scheduler_type="constant")
    whole.train()
    checkpoint = tmp_path / "checkpoint-2"
    if not has_log:
        (checkpoint / LOG_FILE).unlink()
    resumed = trainer(tmp_path / "resumed", lr_scheduler_type="constant")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    if has_log:
        assert mezo_of(resumed.optimizer).log.rows == mezo_of(whole.optimizer).log.rows
        assert same(weights(resumed.model), weights(whole.model))
    assert ("directions begin with those of the first step again" in caplog.text) is not has_log


def test_adapters_alone(tmp_path):
    model = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    before = weights(model)
    run = trainer(tmp_path, model)
    run.train()
    after = weights(run.model)
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    replay(mezo_of(run.optimizer).log, before)
    assert same(before, after)


def in_a_plain_loop(config):
    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    session = attach(model, OffloadConfig(**config))
    loop(model, session.prepare_optimizer(optimizer), scheduler)
    session.detach()
    return weights(model)


def loop(model, optimizer, scheduler):
    for step in range(STEPS):
        optimizer.step(lambda step=step: model(**tiny_batch("llama", seed=step)).loss)
        scheduler.step()
        optimizer.zero_grad()


def with_accelerator(accelerator):
    model = tiny_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loop(*accelerator.prepare(model, optimizer, scheduler))
    accelerator.end_training()
    return weights(model)


def in_a_plugin(config):
    return with_accelerator(OffloadPlugin(**config).accelerator(cpu=True))


def in_the_environment(config):
    with pytest.MonkeyPatch.context() as patched:
        for name, value in variables_for(config).items():
            patched.setenv(name, value)
        switch = switch_on(OffloadPlugin().config)
        try:
            return with_accelerator(Accelerator(cpu=True))
        finally:
            switch.off()


def test_scripts_have_the_same_bits_everywhere():
    config = {"tier": "none", "memory_mode": "mezo", "memory_mode_kwargs": SETTINGS}
    model = tiny_model("llama")
    optimizer = memory_mode("mezo", SETTINGS).optimizer(model, lr=1e-2, weight_decay=lambda one, decays: 0.1)
    loop(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    expected = weights(model)
    for surface in (in_a_plain_loop, in_a_plugin, in_the_environment):
        assert same(surface(config), expected), surface
    assert same(in_a_plain_loop(config | {"tier": "auto"}), expected)


def test_the_trainer_has_the_same_bits_with_weights_in_files(tmp_path):
    expected = trainer(tmp_path)
    expected.train()
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            residency = attached_session(model).residency
            seen.append((residency.most_bytes, residency.budget_bytes))

    (tmp_path / "tier").mkdir()
    run = trainer(
        tmp_path,
        offload_params="ssd",
        offload_directory=str(tmp_path / "tier"),
        offload_memory_budget="40KiB",
        offload_min_bytes="0",
        save_strategy="steps",
        save_steps=STEPS,
    )
    run.add_callback(Look())
    run.train()
    assert same(weights(expected.model), weights(run.model))
    assert len(seen) == STEPS
    assert all(most <= budget for most, budget in seen)
    assert MezoLog.load(tmp_path / f"checkpoint-{STEPS}").rows == mezo_of(expected.optimizer).log.rows


def test_an_accelerator_saves_and_loads_it(tmp_path):
    config = {"tier": "none", "memory_mode": "mezo", "memory_mode_kwargs": SETTINGS}

    def prepared():
        model = tiny_model("llama")
        accelerator = OffloadPlugin(**config).accelerator(cpu=True)
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    accelerator, model, optimizer = prepared()
    step = lambda one, number: one.step(lambda: model(**tiny_batch("llama", seed=number)).loss)  # noqa: E731
    step(optimizer, 0)
    accelerator.save_state(str(tmp_path))
    step(optimizer, 1)
    expected = weights(model)
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model, optimizer = prepared()
    accelerator.load_state(str(tmp_path))
    step(optimizer, 1)
    assert same(weights(model), expected)


def test_a_recipe_is_trained_and_measured(tiny_recipe, tmp_path):
    changes = ["memory={mode: mezo, seed: 3}", "training.max_grad_norm=0", "offload={tier: none}"]
    saving = ["training.save_strategy=steps", "training.save_steps=1"]
    report = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["train", str(tiny_recipe), *changes, *saving, "--report", str(report)])
    assert result.exit_code == 0, result.output + result.stderr
    found = json.loads(report.read_text())
    assert len(found["losses"]) == found["steps"] > 1
    assert found["memory"]["step_peak_bytes"]
    assert len(MezoLog.load(next(tmp_path.rglob(LOG_FILE))).rows) > 0
    refused = CliRunner().invoke(app, ["train", str(tiny_recipe), *changes[:2], "offload={tier: ram}"])
    assert refused.exit_code == 2
    assert "tier='ram' needs a backward pass" in refused.stderr


# --------------------------------------------------------------------------------------------------------------- replay


def replayed(*options):
    return CliRunner().invoke(app, ["replay", *map(str, options)])


def test_a_command_rebuilds_checkpoints(tmp_path):
    run = trainer(tmp_path, save_strategy="steps", save_steps=3)
    run.model.save_pretrained(tmp_path / "initial")
    run.train()
    log = tmp_path / f"checkpoint-{STEPS}"
    for options, step, said in (
        (["--output", tmp_path / "all"], STEPS, f"{STEPS} steps replayed and checked"),
        (["--output", tmp_path / "some", "--steps", 3], 3, "3 steps replayed:"),
    ):
        result = replayed(log / LOG_FILE, tmp_path / "initial", *options)
        assert result.exit_code == 0, result.stderr
        assert said in result.stdout
        expected = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        assert same(expected, load_file(options[1] / "model.safetensors"))
    for arguments, part in (
        ((log, log), "are not what they were before the first step"),
        ((log, tmp_path / "initial", "--steps", 99), "steps=99: the log has 4 steps"),
        ((tmp_path / "initial", tmp_path / "initial"), "cannot be read as a log of MeZO"),
        ((tmp_path / "initial" / "model.safetensors", tmp_path / "initial"), "cannot be read as a log of MeZO"),
        ((log, tmp_path / "nowhere"), "cannot be loaded"),
    ):
        result = replayed(*arguments, "--output", tmp_path / "other")
        assert result.exit_code == 2
        assert part in result.stderr
        assert not (tmp_path / "other").exists()


def test_a_command_rebuilds_what_was_trained_in_another_dtype(tmp_path):
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    whole = trainer(
        tmp_path,
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32),
        save_strategy="steps",
        save_steps=STEPS,
    )
    whole.train()
    folder = tmp_path / f"checkpoint-{STEPS}"
    result = replayed(folder, tmp_path / "base", "--output", tmp_path / "rebuilt")
    assert result.exit_code == 0, result.stderr
    found = load_file(tmp_path / "rebuilt" / "model.safetensors")
    assert same(load_file(folder / "model.safetensors"), found)
    assert {one.dtype for one in found.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "called"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "default"),
        (peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), "default"),
        (peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), "mine"),
    ],
    ids=["prompt", "lora", "named"],
)
def test_a_command_rebuilds_learned_prompts_and_adapters_of_any_name(config, called, tmp_path):
    """With a base that has another dtype in its files."""
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = peft.get_peft_model(base, config, adapter_name=called)
    model.save_pretrained(tmp_path / "initial")
    run = trainer(tmp_path, model, save_strategy="steps", save_steps=2, max_steps=2)
    run.train()
    folder = "" if called == "default" else called
    result = replayed(tmp_path / "checkpoint-2", tmp_path / "initial" / folder, "--output", tmp_path / "rebuilt")
    assert result.exit_code == 0, result.stderr
    initial, expected, found = (
        load_file(tmp_path / each / folder / "adapter_model.safetensors")
        for each in ("initial", "checkpoint-2", "rebuilt")
    )
    assert same(expected, found)
    assert not same(initial, found)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1\.0 clips gradients.*set max_grad_norm=0"),
        ({"fp16": True}, "fp16=True scales the loss"),
        ({"offload": "ram"}, "tier='ram' needs a backward pass"),
        ({"offload_optimizer": "ram"}, "optimizer='ram' needs a backward pass"),
        ({"sampled_linear": "0.3"}, "sampled_linear needs a backward pass"),
        ({"recompute_elementwise": "norms"}, "recompute_elementwise needs a backward pass"),
        ({"optim": "sgd"}, "both choose the optimizer"),
        ({"memory_mode_kwargs": {"eps": 0}}, "eps=0"),
        ({"memory_mode_kwargs": {"rank": 4}}, "memory_mode='mezo' has no setting 'rank'"),
    ],
)
def test_arguments_that_are_refused(others, message, tmp_path):
    with pytest.raises(OffloadConfigError, match=message) as error:
        arguments(tmp_path, **others)
    assert str(error.value).count("memory_mode='mezo'") == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model: torch.optim.Adagrad(model.parameters()),
            "torch.optim.AdamW, torch.optim.Adam or torch.optim.SGD, and this optimizer is Adagrad",
        ),
        (lambda model: torch.optim.SGD(model.parameters(), momentum=0.9), "no momentum"),
        (lambda model: torch.optim.AdamW(model.parameters(), maximize=True), "no maximize"),
    ],
)
def test_optimizers_that_are_refused(make, message):
    model = tiny_model("llama")
    session = attach(model, OffloadConfig(tier="none", memory_mode="mezo"))
    with pytest.raises(OffloadConfigError, match=message):
        session.prepare_optimizer(make(model))
    session.detach()


CYCLES = {
    "one cycle": lambda optimizer, **others: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-2, total_steps=2 * STEPS, **others
    ),
    "cyclic": lambda optimizer, **others: torch.optim.lr_scheduler.CyclicLR(
        optimizer, 1e-3, 1e-2, step_size_up=2, **others
    ),
}


@pytest.mark.parametrize(("cycle", "kind"), [("one cycle", torch.optim.AdamW), ("cyclic", torch.optim.SGD)])
def test_a_schedule_of_momentum_is_refused(cycle, kind):
    model = tiny_model("llama")
    session = attach(model, OffloadConfig(tier="none", memory_mode="mezo"))
    given = kind(model.parameters())
    optimizer = session.prepare_optimizer(given)
    with pytest.raises(OffloadError, match=r"A schedule of (betas|momentum) does not reach .*cycle_momentum=False"):
        scheduler = CYCLES[cycle](given)  # which may begin with the momentum that is there
        optimizer.step(lambda: model(**tiny_batch("llama")).loss)
        scheduler.step()
    assert optimizer.param_groups[0].keys() >= {"lr", "weight_decay", "params"}
    with pytest.raises(
        ValueError, match="with `cycle_momentum` option enabled"
    ):  # PyTorch's own, of which it reads defaults
        CYCLES[cycle](optimizer)
    session.detach()


def test_what_works_on_gradients_is_refused_by_an_accelerator():
    config = {"tier": "none", "memory_mode": "mezo"}
    accelerator = OffloadPlugin(**config).accelerator(cpu=True)
    model = tiny_model("llama")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for call in (
        lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
    ):
        with pytest.raises(OffloadConfigError, match=r"has no gradients, which clip_grad_(norm|value)_\(\) works on"):
            call()
    with pytest.raises(OffloadError, match="backward has computed one"):
        accelerator.backward(model(**tiny_batch("llama")).loss)
    with pytest.raises(OffloadError, match="no losses to work with"):
        optimizer.step()


def test_accumulation_by_an_accelerator_is_refused():
    model = tiny_model("llama")
    accelerator = OffloadPlugin(tier="none", memory_mode="mezo").accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(OffloadConfigError, match="gradient_accumulation_steps=2 adds up gradients"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def test_a_trainer_that_makes_its_own_step_is_refused(tmp_path):
    class Own(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()

    with pytest.raises(OffloadError, match="backward has computed one"):
        trainer(tmp_path, kind=Own).train()


def test_a_trainer_in_the_environment_is_shown_the_arguments(tmp_path, monkeypatch):
    for name, value in variables_for({"tier": "none", "memory_mode": "mezo"}).items():
        monkeypatch.setenv(name, value)
    switch = switch_on(OffloadPlugin().config)
    try:
        args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", max_grad_norm=0)
        run = Trainer(tiny_model("llama"), args, train_dataset=ExampleDataset("llama", 8))
        with pytest.raises(OffloadError, match="set memory_mode='mezo' in OffloadTrainingArguments"):
            run.train()
    finally:
        switch.off()


def test_other_trainers_go_on_with_backward(tmp_path):
    trainer(tmp_path).train()
    usual = trainer(tmp_path, memory_mode="none", memory_mode_kwargs=None, max_grad_norm=1.0)
    usual.train()
    assert all("grad_norm" in entry for entry in usual.state.log_history if "loss" in entry)
