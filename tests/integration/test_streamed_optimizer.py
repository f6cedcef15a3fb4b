"""Optimizer state and gradients on a tier: the bits of the run that keeps them in memory."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

from hf_offload import OffloadCallback, OffloadConfig, OffloadTrainingArguments
from hf_offload.session import attach
from hf_offload.state.optimizer import streaming_of
from tests.helpers.tables import rows

SMALLEST = 4096  # bytes: nearly everything of the models here is streamed


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).train()


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Loop:
    """A loop of one's own: losses, norms, weights and the optimizer's state after some steps."""

    def __init__(self, place, tmp_path, kind=torch.optim.AdamW, clip=False, backwards=1, steps=5, **options):
        self.model = gpt2()
        self.optimizer = kind(self.model.parameters(), lr=1e-3, **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1, (step + 1) / 3))
        self.session = None
        if place != "none":
            directory = {"directory": tmp_path} if place == "ssd" else {}
            config = OffloadConfig(tier="none", optimizer=place, min_bytes=SMALLEST, **directory)
            self.session = attach(self.model, config)
            assert self.session.prepare_optimizer(self.optimizer) is self.optimizer
            self.session.defer_updates()
        random = torch.Generator().manual_seed(1)
        torch.manual_seed(7)  # of dropout
        self.losses, self.norms = [], []
        for _ in range(steps):
            for _ in range(backwards):
                tokens = torch.randint(0, 512, (2, 32), generator=random)
                loss = self.model(input_ids=tokens, labels=tokens).loss
                (loss / backwards).backward()
                self.losses.append(loss.item())
            if clip:
                parameters = list(self.model.parameters())
                clipped = (
                    nn.utils.clip_grad_norm_(parameters, 0.5) if place == "none" else self.session.clip_grad_norm_(0.5)
                )
                self.norms.append(clipped.item())
            self.optimizer.step()
            scheduler.step()
            self.optimizer.zero_grad()

    def results(self):
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        return self.losses, self.norms, weights, self.optimizer.state_dict()


KINDS = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "Adam with amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


LOOPS = list(itertools.product(KINDS, (False, True), (1, 3), ("ram", "ssd")))
# Every two of a kind, clipping, a number of backwards and a place.
QUICK_LOOPS = [
    (kind, clip, backwards, place)
    for kind in KINDS
    for clip, backwards, place in ((False, 1, "ram"), (False, 3, "ssd"), (True, 1, "ssd"), (True, 3, "ram"))
]


@pytest.mark.parametrize(("kind", "clip", "backwards", "place"), rows(LOOPS, quick=QUICK_LOOPS))
def test_a_loop_has_the_bits_of_the_run_in_memory(kind, clip, backwards, place, tmp_path):
    optimizer, options = KINDS[kind]
    expected = Loop("none", tmp_path, optimizer, clip, backwards, **options).results()
    loop = Loop(place, tmp_path, optimizer, clip, backwards, **options)
    streaming = streaming_of(loop.optimizer)
    moved = [record.state_bytes for record in streaming.records if record.state_bytes]
    assert moved or kind == "Adafactor"  # whose factors are small
    assert streaming.state_store.tier.stats.written_bytes >= sum(moved)
    assert streaming.gradient_store.tier.stats.written_bytes > 0
    assert same(expected, loop.results())


def data():
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 512, (32,), generator=random) for _ in range(64)]
    return [{"input_ids": row, "labels": row} for row in rows]


class Mapped(TrainerCallback):
    """Notes whether a state is mapped from a file while the run goes on."""

    found = False

    def on_step_begin(self, args, state, control, **kwargs):
        self.found = self.found or "optimizer.pt" in Path("/proc/self/maps").read_text()


def trained(folder, place, resume=None, **arguments):
    directory = {"offload_directory": str(folder.parent)} if place == "ssd" else {}
    args = OffloadTrainingArguments(
        output_dir=folder,
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        offload_optimizer=place,
        offload_min_bytes=SMALLEST,
        **({"save_steps": 3} | directory | arguments),
    )
    trainer = Trainer(model=gpt2(), args=args, train_dataset=data(), eval_dataset=data()[:8])
    mapped = Mapped()
    trainer.add_callback(mapped)
    trainer.train(resume_from_checkpoint=resume)
    assert not mapped.found
    (callback,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, OffloadCallback)] or [None]
    if place != "none":
        assert any(line.startswith("Optimizer state: ") and f"written to {place}" in line for line in callback.summary)
    kept = ("loss", "grad_norm", "eval_loss", "learning_rate", "step")
    logs = [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return logs, weights, trainer.optimizer.state_dict()


WAYS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "in_backward": {"max_grad_norm": 0.0},  # updated in backward
    "bf16": {"bf16": True, "activation_checkpointing": True},
    "best_model": {"load_best_model_at_end": True, "save_steps": 4},
}
QUICK_WAYS = [
    ("plain", "ram"), ("plain", "ssd"), ("accumulated", "ram"), ("in_backward", "ssd"), ("bf16", "ram"),
    ("best_model", "ssd"),
]  # fmt: skip


@pytest.mark.parametrize(("way", "place"), rows(itertools.product(WAYS, ("ram", "ssd")), quick=QUICK_WAYS))
def test_the_trainer_has_the_bits_of_the_run_in_memory_and_resumes_either_way(way, place, tmp_path):
    arguments = WAYS[way]
    expected = trained(tmp_path / "memory", "none", **arguments)
    streamed = trained(tmp_path / place, place, **arguments)
    assert same(expected, streamed)
    name = f"checkpoint-{arguments.get('save_steps', 3)}"
    ours, plain = (
        torch.load(tmp_path / folder / name / "optimizer.pt", weights_only=True) for folder in (place, "memory")
    )
    assert same(plain, ours)
    for target, source in [(place, place), ("none", place), (place, "memory")]:
        resumed = trained(tmp_path / f"{target}_{source}", target, resume=str(tmp_path / source / name), **arguments)
        assert same(expected[1:], resumed[1:])


def test_gradients_stay_in_memory_until_an_optimizer_is_prepared_which_is_said_once(tmp_path, caplog):
    found = []
    for place in ("none", "ssd"):
        model = gpt2()
        directory = None if place == "none" else tmp_path
        attach(model, OffloadConfig(tier="none", optimizer=place, directory=directory))
        tokens = torch.zeros(1, 8, dtype=torch.long)
        model(input_ids=tokens, labels=tokens).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
    assert sum("prepare_optimizer" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("place", ["none", "ssd"])
def test_clipping_takes_what_pytorch_s_takes(place, tmp_path):
    calls = [
        lambda session, model: session.clip_grad_norm_(1e-3),
        lambda session, model: session.clip_grad_norm_(max_norm=1e-3, norm_type=2.0),
        lambda session, model: session.clip_grad_norm_(model.parameters(), 1e-3),
        lambda session, model: session.clip_grad_norm_(parameters=list(model.parameters()), max_norm=1e-3),
        lambda session, model: session.clip_grad_norm_(model.lm_head.weight, 1e-3),
    ]
    plain = [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: nn.utils.clip_grad_norm_(model.lm_head.weight, 1e-3),
    ]
    tokens = torch.arange(64).reshape(2, 32)
    expected = []
    for clip in plain:
        model = gpt2()
        model(input_ids=tokens, labels=tokens).loss.backward()
        expected.append((clip(model), [one.grad for one in model.parameters()]))
    for clip, (norm, gradients) in zip(calls, [expected[0]] * 4 + expected[1:], strict=True):
        model = gpt2()
        directory = None if place == "none" else tmp_path
        config = OffloadConfig(tier="none", optimizer=place, min_bytes=SMALLEST, directory=directory)
        session = attach(model, config)
        session.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        session.defer_updates()
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert torch.equal(clip(session, model), norm)
        assert all(map(torch.equal, [one.grad for one in model.parameters()], gradients))
        session.detach()


@pytest.mark.parametrize("place", ["none", "ssd"])
def test_a_plan_for_a_budget_counts_what_stays_in_memory(place, tmp_path):
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = sum(p.nbytes for p in model.parameters())
    config = OffloadConfig(tier="auto", memory_budget="1GiB", optimizer=place, min_bytes=SMALLEST, directory=tmp_path)
    session = attach(model, config)
    session.prepare_optimizer(optimizer)
    session.defer_updates()
    for step in range(4):
        tokens = torch.full((2, 32), step)
        with session.scope():
            model(input_ids=tokens, labels=tokens).loss.backward()
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
    footprint = session.planned.footprint
    if place == "ssd":
        assert footprint.base_bytes + footprint.gradient_bytes < 1.2 * weights
    else:
        assert footprint.base_bytes + footprint.gradient_bytes >= 4 * weights
