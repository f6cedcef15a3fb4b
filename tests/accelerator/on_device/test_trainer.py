"""The Trainer and accelerate, neither of them changed, on the late device: they take it where ``ACCELERATE_TORCH_DEVICE``
names it. Every loss, norm, weight and optimizer state is the same with offloading as without.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_offload import OffloadCallback, OffloadPlugin, OffloadTrainingArguments
from hf_offload.integrations.accelerate import attached_accelerators
from hf_offload.plan.hardware import Hardware, Measurement
from hf_offload.session import attached_session
from tests.accelerator.on_device.training import differences, let_go_of_what_was_loaded
from tests.helpers.tiny_models import ExampleDataset, gradients, tiny_model, weights

DEVICE = torch.device("late:0")
STEPS = 4
SHARED = {
    "max_steps": STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "max_grad_norm": 0.5, "warmup_steps": 1, "lr_scheduler_type": "cosine", "logging_steps": 1, "report_to": "none",
    "disable_tqdm": True, "save_strategy": "no", "seed": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def accelerate_takes_the_late_device(late, monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(DEVICE))
    let_go()
    yield
    let_go()


def let_go() -> None:
    """Of accelerate's own state, and of what was attached to it."""
    for offloaded in attached_accelerators():
        offloaded.detach()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def known_machine(monkeypatch):
    """A link so fast that a plan moves rather than recomputes, however busy the machine is."""
    flops = {name: Measurement(1e9, "given") for name in ("float32", "bfloat16", "float16")}
    rate = {"ram": Measurement(1e11, "given"), "ssd": Measurement(1e10, "given")}
    room = {"ram": Measurement(1e10, "given"), "ssd": Measurement(1e10, "given")}
    hardware = Hardware(
        "a test", "late", Measurement(4e9, "given"), flops, Measurement(1e10, "given"), rate, rate, room
    )
    monkeypatch.setattr("hf_offload.planning.ranks.measure_hardware", lambda directories, device, **options: hardware)
    monkeypatch.setattr("hf_offload.engine.hooks.Engine.bandwidth", lambda engine: {})


def settle(model: nn.Module) -> None:
    session = attached_session(model)
    if session is not None:
        let_go_of_what_was_loaded(session)


class _Record(TrainerCallback):
    """What a run computes, and the bytes allocated after each step and at its peak."""

    def __init__(self) -> None:
        self.trace: dict[str, torch.Tensor] = {}
        self.allocated: list[int] = []
        self.peaks: list[int] = []

    def on_step_begin(self, args, state, control, **kwargs):
        torch.accelerator.reset_peak_memory_stats()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for name, gradient in gradients(model).items():
            self.trace[f"step {state.global_step}: gradient of {name}"] = gradient.cpu()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.peaks.append(torch.accelerator.max_memory_allocated())
        settle(model)
        self.allocated.append(torch.accelerator.memory_allocated())


def train(arguments: TrainingArguments) -> tuple[_Record, OffloadCallback | None]:
    """A run of the Trainer: what it has computed, and the callback that offloaded."""
    gc.collect()
    before = torch.accelerator.memory_allocated()
    record = _Record()
    model = tiny_model("gpt2")
    run = Trainer(model=model, args=arguments, train_dataset=ExampleDataset("gpt2", 8 * STEPS), callbacks=[record])
    run.train()
    assert {parameter.device for parameter in model.parameters()} == {DEVICE}
    for entry in run.state.log_history:
        figures = {name: entry[name] for name in ("loss", "grad_norm", "learning_rate") if name in entry}
        record.trace |= {f"log {entry['step']}: {name}": torch.tensor(value) for name, value in figures.items()}
    record.trace |= {f"weight {name}": value.cpu() for name, value in weights(model).items()}
    for number, state in enumerate(run.optimizer.state.values()):
        record.trace |= {f"state {number}: {name}": value.cpu() for name, value in state.items()}
    record.allocated = [one - before for one in record.allocated]
    record.peaks = [one - before for one in record.peaks]
    callbacks = run.callback_handler.callbacks
    return record, next((one for one in callbacks if isinstance(one, OffloadCallback)), None)


def assert_exact(
    late: Any, tmp_path: Path, shared: dict[str, Any], offload: Callable[[_Record], dict[str, Any]]
) -> None:
    expected, _ = train(TrainingArguments(output_dir=str(tmp_path / "plain"), **shared))
    for seed in range(2):
        late.reseed(seed)
        ours = offload(expected) | {"output_dir": str(tmp_path / "ours"), "offload_min_bytes": "0"}
        found, callback = train(OffloadTrainingArguments(**shared | ours))
        assert differences(expected.trace, found.trace) == [], f"seed {seed}"
        assert found.allocated == expected.allocated
        assert callback.stats.total.offloaded_bytes > 0
        assert callback.stats.total.refused_bytes == 0
        budget = ours.get("offload_memory_budget")
        # Tensors of a model this small are less than the 512 bytes that an allocator gives them.
        assert budget is None or max(found.peaks) <= 1.05 * int(budget)


def test_the_trainer_within_a_budget(late, known_machine, tmp_path):
    def offload(plain: _Record) -> dict[str, Any]:
        fixed, peak = max(plain.allocated), max(plain.peaks)
        return {
            "offload": "auto",
            "offload_memory_budget": str((fixed + peak) // 2),
            "offload_directory": str(tmp_path),
        }

    assert_exact(late, tmp_path, SHARED, offload)


def test_the_trainer_with_activation_checkpointing(late, tmp_path):
    shared = SHARED | {"activation_checkpointing": True}
    assert_exact(late, tmp_path, shared, lambda _: {"offload": "ssd", "offload_directory": str(tmp_path)})


def loop(accelerator: Accelerator) -> tuple[dict[str, torch.Tensor], list[int], nn.Module]:
    """A training written as accelerate's documentation has it, the bytes allocated after each of its steps, and its model."""
    gc.collect()
    before = torch.accelerator.memory_allocated()
    torch.manual_seed(0)
    model = tiny_model("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(ExampleDataset("gpt2", 4 * STEPS), batch_size=2, pin_memory=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    trace: dict[str, torch.Tensor] = {}
    allocated = []
    for step, inputs in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**inputs).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                trace[f"{step}: norm"] = accelerator.clip_grad_norm_(model.parameters(), 0.5).cpu()
                trace |= {f"{step}: gradient of {name}": value.cpu() for name, value in gradients(model).items()}
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        trace[f"{step}: loss"] = loss.detach().cpu()
        del loss, inputs
        settle(model)
        allocated.append(torch.accelerator.memory_allocated() - before)
    trace |= {f"weight {name}": value.cpu() for name, value in weights(model).items()}
    return trace, allocated, model


@pytest.mark.parametrize("settings", [{"tier": "ram"}, {"tier": "ssd", "ram_budget": 64 << 10}], ids=["ram", "spill"])
def test_a_loop_with_an_accelerator(late, settings):
    expected, allocated, _ = loop(Accelerator(gradient_accumulation_steps=2))
    for seed in range(2):
        let_go()
        late.reseed(seed)
        plugin = OffloadPlugin(min_bytes=0, **settings)
        found, found_allocated, model = loop(plugin.accelerator(gradient_accumulation_steps=2))
        stats = attached_session(model).stats.total
        assert differences(expected, found) == [], f"seed {seed}"
        assert found_allocated == allocated
        assert stats.offloaded_bytes > 0
        assert stats.refused_bytes == 0
        del model
