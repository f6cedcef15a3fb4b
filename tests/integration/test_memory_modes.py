"""One word in the training arguments: what is trained, that it resumes, what it lives with, and what is refused."""

import contextlib
import json
import sys
from functools import partial

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from transformers import HfArgumentParser, Trainer, TrainerCallback

from hf_offload import OffloadCallback, OffloadConfig, OffloadConfigError, OffloadTrainingArguments
from hf_offload.methods.blockwise import BlockwiseOptimizer
from hf_offload.methods.projected import GaLoreConfig, ProjectedAdamW
from hf_offload.settings.memory_modes import MODES, memory_mode
from hf_offload.state.registry import parked_of
from tests.helpers.loaded_processes import run_python
from tests.helpers.tables import rows
from tests.helpers.tiny_models import ExampleDataset, tiny_batch, tiny_model, weights
from tests.helpers.torchao_optimizers import optimizer_of
from tests.helpers.trainers import QUIET

SETTINGS = {
    "lora": {"rank": 4},
    "qlora": {"rank": 4},
    "lora_fa": {"rank": 4},
    "dora": {"rank": 4},
    "adamw_8bit": {},
    "galore": {"rank": 4, "update_proj_gap": 2},
    "galore_8bit": {"rank": 4, "update_proj_gap": 2},
    "apollo": {"rank": 4, "update_proj_gap": 2},
    "apollo_mini": {"update_proj_gap": 2},
    "frugal": {"update_proj_gap": 2},
    "lisa": {"blocks_active": 1, "switch_every": 2},
    "badam": {"switch_every": 2},
}
STEPS = 4
ADAPTERS = ("lora", "qlora", "lora_fa", "dora")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # peft uses the older name


def arguments(folder, mode, settings=None, **others):
    kwargs = SETTINGS.get(mode) if settings is None else settings
    usual = {"max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1}
    mine = {"output_dir": str(folder), "memory_mode": mode, "memory_mode_kwargs": kwargs}
    return OffloadTrainingArguments(**QUIET | usual | mine | others)


def trainer(folder, mode, settings=None, name="llama", **others):
    torch.manual_seed(0)
    model = tiny_model(name)
    return Trainer(
        model=model, args=arguments(folder, mode, settings, **others), train_dataset=ExampleDataset(name, 12)
    )


def trained(folder, mode, **others):
    run = trainer(folder, mode, **others)
    run.train()
    return run


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def same(one, other):
    found = weights(other)
    return all(torch.equal(weight, found[name]) for name, weight in weights(one).items())


@pytest.mark.parametrize("mode", rows(SETTINGS, quick=["lora", "qlora", "adamw_8bit", "galore", "frugal", "badam"]))
def test_one_word_is_enough_and_it_resumes(mode, tmp_path):
    """The same weights as a run that was never stopped, with a schedule that ends at zero."""
    whole = trainer(tmp_path, mode, save_strategy="steps", save_steps=3)
    before = weights(whole.model)
    whole.train()
    changed = [name for name, weight in weights(whole.model).items() if not torch.equal(weight, before[name])]
    assert changed
    if mode in ADAPTERS:
        assert isinstance(whole.model, peft.PeftModel)
        assert all("lora_" in name for name in changed)
        assert any(("lora_A" in name) != (mode == "lora_fa") for name in changed)
        assert (tmp_path / "checkpoint-3" / "adapter_model.safetensors").is_file()
    again = trainer(tmp_path, mode, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(again)[3:] == losses(whole)[3:]
    assert same(whole.model, again.model)
    assert all(p.requires_grad for p in whole.model.parameters()) or mode in ADAPTERS


@pytest.mark.parametrize(
    ("mode", "moment"),
    [("adamw_8bit", lambda state: state["state1"].dtype == torch.uint8),
     ("adamw_4bit", lambda state: type(state["exp_avg"]).__name__ == "OptimState4bit")],
    ids=["adamw_8bit", "adamw_4bit"],
)  # fmt: skip
def test_moments_that_are_in_few_bits_resume(mode, moment, tmp_path):
    """Both packages leave weights alone that are as small as those of the tiny model."""

    def run(**others):
        torch.manual_seed(0)
        config = tiny_model("llama").config
        config.intermediate_size = 256
        return Trainer(
            model=transformers.LlamaForCausalLM(config),
            args=arguments(tmp_path, mode, {}, **others),
            train_dataset=ExampleDataset("llama", 12),
        )

    with optimizer_of(mode):
        whole = run(save_strategy="steps", save_steps=3)
        whole.train()
        narrow = {p.numel() for p, state in whole.optimizer.optimizer.state.items() if moment(state)}
        assert narrow == {256 * 32}
        again = run()
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert losses(again)[3:] == losses(whole)[3:]
        assert same(whole.model, again.model)
        other = run(learning_rate=2e-2)
        other.train()
        assert not same(whole.model, other.model)


def test_heads_of_other_models_get_no_adapters(tmp_path):
    for name in ("gpt2", "bert", "t5"):
        run = trained(tmp_path, "lora", name=name, max_steps=1)
        chosen = {name.partition(".lora_A")[0] for name, _ in run.model.named_parameters() if ".lora_A" in name}
        assert chosen
        assert not any(one.endswith(("lm_head", "cls.predictions.decoder", "wte", "shared")) for one in chosen)


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    for name in ("torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OffloadConfigError, match="memory_mode='adamw_4bit' needs torchao: pip install torchao"):
        trainer(tmp_path, "adamw_4bit", {}).train()


@pytest.mark.parametrize("mode", ["lora", "lisa"])
def test_the_update_is_made_by_the_kernel_that_the_arguments_name(mode, tmp_path):
    for optim, fused in (("adamw_torch_fused", True), ("adamw_torch", None)):
        run = trainer(tmp_path, mode, optim=optim)
        run.create_optimizer()
        assert {group["fused"] for group in run.optimizer.param_groups} == {fused}
        run.train()


def test_lora_is_what_peft_and_the_trainer_make_of_it(tmp_path):
    ours = trained(tmp_path, "lora", weight_decay=0.1)
    torch.manual_seed(0)
    model = tiny_model("llama")
    transformers.set_seed(ours.args.seed)  # which the Trainer sets before its adapters are drawn
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = Trainer(
        model=peft.get_peft_model(
            model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
        ),
        args=arguments(tmp_path, "none", {}, weight_decay=0.1),
        train_dataset=ExampleDataset("llama", 12),
    )
    theirs.train()
    assert losses(ours) == losses(theirs)
    assert same(ours.model, theirs.model)


@pytest.mark.parametrize("mode", ["galore", "lisa", "lora"])
def test_the_schedule_betas_and_decay_are_those_of_the_arguments(mode, tmp_path):
    usual = trained(tmp_path, mode)
    for change in (
        {"lr_scheduler_type": "constant"},
        {"adam_beta1": 0.5},
        {"adam_epsilon": 1e-2},
        {"weight_decay": 0.5},
    ):
        assert not same(usual.model, trained(tmp_path, mode, **change).model), change


@pytest.mark.parametrize("mode", ["lora", "lisa"])
def test_offloading_changes_no_bit(mode, tmp_path):
    settings = {"offload": "ssd", "offload_directory": str(tmp_path), "offload_min_bytes": "0"}
    expected, found = trained(tmp_path, mode), trained(tmp_path, mode, **settings)
    assert same(expected.model, found.model)
    assert any("offload/moved_gib" in entry for entry in found.state.log_history)


def test_with_sampled_layers_and_checkpointing(tmp_path):
    mode = "lisa"
    renamed = "activation_checkpointing" in OffloadTrainingArguments.__dataclass_fields__
    checkpointing = {f"{'activation' if renamed else 'gradient'}_checkpointing": True}
    exact, sampled = trained(tmp_path, mode), trained(tmp_path, mode, sampled_linear="0.3")
    checkpointed = trained(tmp_path, mode, **checkpointing)
    assert not same(exact.model, sampled.model)
    assert same(exact.model, checkpointed.model)


def test_update_in_backward_is_the_same_update(tmp_path):
    settings = SETTINGS["galore"]
    usual = trainer(tmp_path, "galore", settings, max_grad_norm=0)
    usual.train()
    inner = trainer(tmp_path, "galore", settings | {"update_in_backward": True}, max_grad_norm=0)
    inner.train()
    assert same(usual.model, inner.model)
    logged = [["grad_norm" in entry for entry in run.state.log_history if "loss" in entry] for run in (usual, inner)]
    assert all(logged[0])
    assert len(logged[1]) == len(logged[0])
    assert not any(logged[1])  # of gradients that are gone the norm would be 0
    assert not any(parameter._post_accumulate_grad_hooks for parameter in inner.model.parameters())


def test_a_second_training_goes_on(tmp_path):
    class CountFrozen(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            frozen.append(sum(not parameter.requires_grad for parameter in model.parameters()))

    frozen = []
    run = trainer(tmp_path, "lisa", {"blocks_active": 1, "switch_every": 1})
    run.add_callback(CountFrozen())
    run.train()
    assert isinstance(run.optimizer.optimizer, BlockwiseOptimizer)
    before = weights(run.model)
    run.train()
    assert not all(torch.equal(weight, before[name]) for name, weight in weights(run.model).items())
    assert all(parameter.requires_grad for parameter in run.model.parameters())
    assert frozen == [9] * 2 * STEPS  # one of the two blocks, in both trainings


def test_model_init_and_the_parser(tmp_path):
    (args,) = HfArgumentParser(OffloadTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--memory_mode", "galore", "--memory_mode_kwargs", '{"rank": 4}', "--max_steps", "1",
         "--use_cpu", "true", "--report_to", "none", "--disable_tqdm", "true"]
    )  # fmt: skip
    assert json.loads(args.to_json_string())["memory_mode_kwargs"] == '{"rank": 4}'
    run = Trainer(model_init=lambda: tiny_model("llama"), args=args, train_dataset=ExampleDataset("llama", 8))
    run.train()
    assert isinstance(run.optimizer.optimizer, ProjectedAdamW)
    assert run.optimizer.optimizer.method.rank == 4


def test_other_trainers_are_left_alone(tmp_path):
    arguments(tmp_path, "galore")
    usual = trainer(tmp_path, "none", {})
    plain = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    other = Trainer(model=tiny_model("llama"), args=plain, train_dataset=ExampleDataset("llama", 8))
    for run in (usual, other):
        run.train()
        assert isinstance(run.optimizer.optimizer, torch.optim.AdamW)
        assert not any(type(one).__name__ == "MemoryModeCallback" for one in run.callback_handler.callbacks)


def test_a_callback_that_has_a_mode(tmp_path):
    """It changes what a Trainer's constructor is given, and nothing later."""
    config = OffloadConfig(tier="none", memory_mode="lora", memory_mode_kwargs={"rank": 4})
    plain = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=2, report_to="none", use_cpu=True)

    def run(args, **others):
        torch.manual_seed(0)
        return Trainer(model=tiny_model("llama"), args=args, train_dataset=ExampleDataset("llama", 8), **others)

    found = run(plain, callbacks=[OffloadCallback(config)])
    found.train()
    by_arguments = run(
        arguments(tmp_path, "lora", learning_rate=plain.learning_rate, max_steps=2, per_device_train_batch_size=8)
    )
    by_arguments.train()
    assert same(found.model, by_arguments.model)
    late = run(plain)
    late.add_callback(OffloadCallback(config))
    with pytest.raises(OffloadConfigError, match="as the Trainer is made"):
        late.train()


def test_adapters_depend_on_the_seed_of_the_arguments_alone(tmp_path):
    def adapters(seed, before):
        torch.manual_seed(0)
        model = tiny_model("llama")
        torch.manual_seed(before)
        run = Trainer(model, arguments(tmp_path, "lora", seed=seed), train_dataset=ExampleDataset("llama", 4))
        return run.model, torch.rand(1)

    (one, drawn), (other, drawn_then), (third, _) = adapters(1, 0), adapters(1, 5), adapters(2, 0)
    assert same(one, other)
    assert drawn == drawn_then
    assert not same(one, third)
    torch.manual_seed(1)
    assert drawn == torch.rand(1)  # what comes later is drawn as without adapters


@pytest.mark.parametrize("mode", ["lora", "lisa"])
def test_loops_of_ones_own(mode):
    """With accelerate's wrapper around the optimizer, and accumulation in which it does not step, as without both."""
    found = []
    for accelerator in (None, Accelerator(cpu=True, gradient_accumulation_steps=2)):
        chosen = memory_mode(mode, SETTINGS[mode])
        torch.manual_seed(0)
        model = chosen.prepare(tiny_model("llama"))
        optimizer = chosen.optimizer(model, lr=1e-2, weight_decay=0.01)
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(8):
            with contextlib.nullcontext() if accelerator is None else accelerator.accumulate(model):
                loss = model(**tiny_batch("llama", seed=step)).loss / (2 if accelerator is None else 1)
                (loss.backward if accelerator is None else partial(accelerator.backward, loss))()
                if accelerator is not None or step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(model)
    assert same(*found)


@pytest.mark.parametrize("own", [{}, {"update_in_backward": True}, {"targets": ["q_proj"]}])
def test_a_state_dict_has_the_settings_of_the_method_alone(own):
    method = {"rank": 4, "update_proj_gap": 3}
    assert memory_mode("galore", method | own).as_dict() == GaLoreConfig(**method).as_dict()


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("galore", {"rank": 4, "update_proj_gap": 2}),
        ("apollo", {"rank": 4, "update_proj_gap": 2, "update_in_backward": True}),
        ("badam", {"switch_every": 1, "order": "ascending", "inactive_state": "keep"}),
        ("lisa", {"blocks_active": 1, "switch_every": 2}),
    ],
)
def test_state_of_its_optimizer_leaves_memory_and_changes_no_bit(mode, settings, tmp_path):
    # Of BAdam, five units: after five steps, the first one goes on with what it had.
    norm = {"max_grad_norm": 0.0} if "update_in_backward" in settings else {}
    long = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3} | norm
    expected = trained(tmp_path / "memory", mode, settings=settings, max_steps=7, **norm)
    moved = {"offload_optimizer": "ssd", "offload_directory": str(tmp_path), "offload_min_bytes": 1}
    run = trained(tmp_path / "tier", mode, settings=settings, **long, **moved)
    assert same(run.model, expected.model)
    assert losses(run) == losses(expected)
    optimizer = run.optimizer.optimizer
    away = [one for state in optimizer.state.values() for one in state.values() if parked_of(one) is not None]
    assert away
    again = trainer(tmp_path / "tier", mode, settings, **long | {"save_strategy": "no"}, **moved)
    again.train(resume_from_checkpoint=str(tmp_path / "tier" / "checkpoint-3"))
    assert same(again.model, expected.model)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("mode", "settings", "part"),
    [
        ("galor", None, "Did you mean 'galore'"),
        ("galore", {"alpha": 16}, r"has no setting 'alpha' \(it is one of lora, qlora, lora_fa, dora\)"),
        ("lora", {"update_proj_gap": 2}, "it is one of galore"),
        ("galore", {"rank": 0, "scale": -1}, "2 errors"),
        ("galore", {"update_in_backward": "yes"}, "neither true nor false"),
        ("galore", "rank=4", "is not valid JSON"),
        ("galore", "[4]", "not a mapping"),
        ("none", {"rank": 4}, "memory_mode is 'none'"),
        ("lisa", {"blocks_active": 0}, "blocks_active=0"),
        ("lisa", {"inactive_state": "disk"}, "choose one of drop, keep"),
        ("lora", {"dropout": 1.0}, "dropout=1.0 is too large: give less than 1"),
    ],
)
def test_wrong_settings(mode, settings, part, tmp_path):
    with pytest.raises(OffloadConfigError, match=part):
        arguments(tmp_path, mode, settings)


@pytest.mark.parametrize(
    ("others", "part"),
    [
        ({"optim": "galore_adamw"}, "both choose the optimizer"),
        ({"optim": "adafactor", "max_grad_norm": 1.0}, "both choose the optimizer"),
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0 needs all gradients at once"),
        ({"max_grad_norm": 0, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"max_grad_norm": 0, "fp16": True}, "fp16=True"),
    ],
)
def test_what_does_not_go_together(others, part, tmp_path):
    with pytest.raises(OffloadConfigError, match=part):
        arguments(tmp_path, "galore", {"rank": 4, "update_in_backward": True}, **others)


@pytest.mark.parametrize(
    ("mode", "settings", "part"),
    [
        ("lora", {"targets": ["qproj"]}, r"matches no linear layer .*Did you mean 'q_proj'.*model\.layers\.N\.mlp"),
        ("galore", {"targets": ["qproj"]}, "matches no linear layer"),
        ("lora", {"rank": 1000}, "rank=1000 is above the smaller dimension of model.layers.0"),
        ("galore", {"rank": 1000}, "rank"),
        ("lisa", {"blocks_active": 7}, "blocks_active=7"),
    ],
)
def test_settings_that_do_not_fit_the_model(mode, settings, part, tmp_path):
    run_model = tiny_model("llama")
    before = weights(run_model)
    with pytest.raises(OffloadConfigError, match=part):
        Trainer(
            model=run_model, args=arguments(tmp_path, mode, settings), train_dataset=ExampleDataset("llama", 4)
        ).train()
    assert weights(run_model).keys() == before.keys()


def test_a_second_optimizer_is_refused(tmp_path):
    model, data = tiny_model("llama"), ExampleDataset("llama", 4)
    given = (
        {"optimizers": (torch.optim.AdamW(model.parameters()), None)},
        {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {})},
    )
    for others, message in zip(given, ("was given an optimizer", "optimizer_cls_and_kwargs"), strict=True):
        with pytest.raises(OffloadConfigError, match=message):
            Trainer(model=model, args=arguments(tmp_path, "galore"), train_dataset=data, **others)
    run = trainer(tmp_path, "lora")
    run.optimizer = torch.optim.SGD(run.model.parameters())  # as a create_optimizer of a subclass does
    with pytest.raises(OffloadConfigError, match=r"memory_mode='lora' chooses the optimizer.*\(SGD\)"):
        run.train()


FROM_FILE = """
import sys, torch
from transformers import Trainer
from tests.helpers.tiny_models import ExampleDataset, tiny_model
arguments = torch.load("training_args.bin", weights_only=False)
run = Trainer(tiny_model("llama"), arguments, train_dataset=ExampleDataset("llama", 4))
run.train()
print(type(run.optimizer.optimizer).__name__)
"""


def test_the_mode_holds_in_a_process_that_made_no_arguments_with_one(tmp_path):
    torch.save(arguments(tmp_path, "galore", max_steps=1), tmp_path / "training_args.bin")
    done = run_python([sys.executable, "-c", FROM_FILE], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ProjectedAdamW"


def test_arguments_that_exclude_a_mode_set_later_are_refused(tmp_path):
    late = arguments(tmp_path, "none", {}, optim="adafactor")
    late.memory_mode = "galore"
    with pytest.raises(OffloadConfigError, match="both choose the optimizer"):
        Trainer(tiny_model("llama"), late, train_dataset=ExampleDataset("llama", 4))


def test_adapters_on_adapters(tmp_path):
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(OffloadConfigError, match="has adapters already"):
        Trainer(model=model, args=arguments(tmp_path, "lora"), train_dataset=ExampleDataset("llama", 4))


def test_a_checkpoint_of_another_mode(tmp_path):
    trainer(tmp_path, "galore", save_strategy="steps", save_steps=3).train()
    for mode in ("apollo", "lisa"):
        with pytest.raises(OffloadConfigError):
            trainer(tmp_path, mode).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_every_mode_has_a_test():
    # That one where torchao is installed, and that one, which has no gradients, in test_mezo.py.
    assert set(MODES) == {"adamw_4bit", "mezo", *SETTINGS}
    assert memory_mode("none") is None
