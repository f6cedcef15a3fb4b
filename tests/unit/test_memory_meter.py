import gc
import itertools
import threading
import time

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from hf_offload.training import gauges, memory
from hf_offload.training.gauges import choose_gauge
from hf_offload.training.memory import MemoryMeter
from hf_offload.training.report import WARMUP_STEPS, TrainingReport, median_after_warmup, parameter_digest
from tests.helpers.bench_recipes import fake_report
from tests.helpers.tables import rows
from tests.helpers.tiny_models import tiny_model
from tests.helpers.trainers import make_trainer

MB = 1 << 20


def train(tmp_path, meter=None, callbacks=(), **arguments):
    options = {"max_steps": 5, "learning_rate": 1e-2, "weight_decay": 0.1, "logging_steps": 1} | arguments
    model = tiny_model("gpt2")
    trainer = make_trainer(
        tmp_path,
        model,
        name="gpt2",
        arguments=TrainingArguments,
        callbacks=callbacks,
        dataloader_pin_memory=False,
        **options,
    )
    if meter is not None:
        meter.install(trainer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, parameter_digest(trainer.model), trainer


@pytest.mark.parametrize(
    "arguments",
    rows(
        [
            {},
            {"gradient_accumulation_steps": 2},
            {"optim": "adamw_torch"},
            {"optim": "adamw_torch", "optim_args": "amsgrad=True"},
            {"optim": "sgd"},
            {"optim": "adagrad"},
            {"optim": "rmsprop", "optim_args": "momentum=0.9"},
        ],
        quick=[{"gradient_accumulation_steps": 2}, {"optim": "adagrad"}],
    ),
    ids=str,
)
def test_measuring_changes_no_bit(tmp_path, arguments):
    plain = train(tmp_path, **arguments)
    meter = MemoryMeter()
    measured = train(tmp_path, meter, **arguments)
    assert measured[:2] == plain[:2]
    assert len(set(plain[0])) == 5, "the run learns nothing, so it would not show a difference"
    assert len(meter.step_times_s) == 5


@pytest.mark.parametrize(("optim", "copies"), [("adamw_torch", 3), ("sgd", 1)])
def test_gradients_and_optimizer_state_are_in_the_baseline(tmp_path, optim, copies):
    meter = MemoryMeter()
    trainer = train(tmp_path, meter, optim=optim, warmup_steps=0)[2]
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    counters = 4 * len(list(trainer.model.parameters())) * (copies == 3)
    assert meter._gradient_bytes + memory._state_bytes(trainer.optimizer) == copies * weights + counters


def test_state_of_a_resumed_optimizer_and_existing_gradients_are_counted_once():
    model = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    meter = MemoryMeter()
    arguments = TrainingArguments(output_dir="unused", use_cpu=True)
    meter.on_train_begin(arguments, None, None, model=model, optimizer=optimizer)
    before = meter.record.baseline_bytes
    meter.stop()
    assert meter.record.baseline_bytes == before
    assert memory._state_bytes(optimizer) == 2 * 4_000_000 + 4


def test_frozen_parameters_have_no_gradient():
    model = torch.nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    assert memory._missing_gradients(model, None) == 9 * 4


class Spike(TrainerCallback):
    """Takes ``size`` bytes and gives them back once ``meter`` has sampled them, at one moment of training."""

    def __init__(self, event, size, meter):
        self.size = size
        self.meter = meter
        setattr(self, event, self.take)

    def take(self, args, state, control, **kwargs):
        block = torch.ones(self.size, dtype=torch.uint8)
        times_s = self.meter._sampler.times_s
        for _ in range(2):  # the first may have begun before
            last, limit_s = times_s[-1:], time.monotonic() + 60
            while times_s[-1:] == last and time.monotonic() < limit_s:
                time.sleep(0.001)
        del block
        gc.collect()


@pytest.mark.parametrize(
    "event", rows(["on_step_begin", "on_step_end", "on_optimizer_step"], quick=["on_optimizer_step"])
)
def test_a_spike_in_training_is_seen(tmp_path, event):
    quiet, loud = MemoryMeter(), MemoryMeter()
    train(tmp_path, quiet)
    train(tmp_path, loud, [Spike(event, 200 * MB, loud)])
    assert loud.record.peak_bytes - loud.record.baseline_bytes > 190 * MB
    assert quiet.record.peak_bytes - quiet.record.baseline_bytes < 100 * MB
    assert max(loud.record.timeline_bytes) - loud.record.baseline_bytes > 190 * MB


def test_a_spike_before_training_is_not_part_of_it(tmp_path):
    block = torch.ones(300 * MB, dtype=torch.uint8)
    del block
    meter = MemoryMeter()
    train(tmp_path, meter)
    assert meter.record.peak_bytes - meter.record.baseline_bytes < 100 * MB


def test_what_another_callback_takes_at_the_start_counts(tmp_path):
    class Keeps(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.block = torch.ones(150 * MB, dtype=torch.uint8)

    meter = MemoryMeter()
    train(tmp_path, meter, [Keeps()])
    assert meter.record.peak_bytes - meter.record.baseline_bytes > 145 * MB


def test_without_the_kernels_peak_it_is_sampled(tmp_path, monkeypatch, caplog):
    def refuse(self):
        raise PermissionError("read-only /proc")

    monkeypatch.setattr(gauges._LinuxGauge, "reset_peak", refuse)
    meter = MemoryMeter()
    with caplog.at_level("WARNING", logger="hf_offload"):
        train(tmp_path, meter, [Spike("on_step_end", 200 * MB, meter)])
    assert "sampled every 10 ms" in caplog.text
    assert meter.record.peak_source.startswith("sampled")
    assert meter.record.peak_bytes - meter.record.baseline_bytes > 190 * MB


def test_the_sampler_ends_after_an_exception(tmp_path):
    class Raises(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("step failed")

    meter = MemoryMeter()
    with pytest.raises(RuntimeError, match="step failed"):
        train(tmp_path, meter, [Raises()])
    sampler = meter._sampler
    meter.stop()
    meter.stop()
    assert not sampler._thread.is_alive()
    assert meter.record.peak_bytes >= meter.record.baseline_bytes > 0


def test_a_long_timeline_keeps_its_maxima(monkeypatch):
    monkeypatch.setattr(memory, "MOST_SAMPLES", 8)
    monkeypatch.setattr(memory, "SAMPLE_PERIOD_S", 0.001)
    many = threading.Event()

    def sampled():
        yield from [5, 99, *([1] * 60)]
        many.set()
        yield from itertools.repeat(1)

    levels = sampled()
    sampler = memory._Sampler(lambda: next(levels), lambda: None, time.perf_counter())
    sampler.start()
    assert many.wait(60)
    sampler.stop()
    assert len(sampler.bytes) < 8
    assert len(sampler.bytes) == len(sampler.times_s)
    assert sampler.times_s == sorted(sampler.times_s)
    assert max(sampler.bytes) == 99


@pytest.mark.skipif(gauges._allocator_counter() is None, reason="this allocator does not tell what is in use")
@pytest.mark.parametrize("size", [100 * MB, 1000], ids=["mapped", "heap"])
def test_the_allocator_knows_what_is_in_use(size):
    counter = gauges._allocator_counter()
    before = counter()
    blocks = [torch.empty(size, dtype=torch.uint8) for _ in range(10)]
    taken = counter() - before
    assert 10 * size <= taken <= 10 * size + MB
    del blocks
    assert counter() - before < MB


@pytest.mark.gpu
def test_cuda_counts_what_pytorch_allocates(tmp_path):
    gauge = choose_gauge(torch.device("cuda"))
    gauge.settle()
    before = gauge.level()
    gauge.reset_peak()
    block = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
    del block
    assert gauge.level() == before
    assert gauge.peak() - before == 64 * MB


def test_a_digest_sees_every_bit_and_every_name():
    model = torch.nn.Linear(4, 4)
    digest = parameter_digest(model)
    assert parameter_digest(model) == digest
    with torch.no_grad():
        model.bias[0] = 0.0
        zero = parameter_digest(model)
        model.bias[0] = -0.0
    assert len({digest, zero, parameter_digest(model)}) == 3
    for dtype in (torch.bfloat16, torch.float16):
        assert parameter_digest(torch.nn.Linear(2, 2).to(dtype))
    assert parameter_digest(torch.nn.ParameterDict({"a": torch.ones(())})) != parameter_digest(
        torch.nn.ParameterDict({"b": torch.ones(())})
    )


def test_the_median_leaves_out_the_first_steps():
    assert WARMUP_STEPS == 2
    assert median_after_warmup([9.0, 9.0, 1.0, 3.0, 2.0]) == 2.0
    assert median_after_warmup([9.0, 7.0]) == 8.0
    assert median_after_warmup([]) is None


def test_a_report_survives_its_file(tmp_path):
    report = fake_report(losses=[0.1], memory={"peak_bytes": 30, "baseline_bytes": 10})
    report.write(tmp_path / "deep" / "report.json")
    assert TrainingReport.read(tmp_path / "deep" / "report.json") == report
    assert report.peak_over_baseline_bytes == 20
