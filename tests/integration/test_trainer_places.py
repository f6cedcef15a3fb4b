"""A Trainer with weights, gradients and optimizer state on tiers: bits of the run in memory, also resumed from either."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from hf_offload import OffloadCallback, OffloadConfig, attach
from hf_offload.state.optimizer import streaming_of
from hf_offload.state.weights import weights_of
from tests.helpers.train import copied, same
from tests.helpers.trainers import make_trainer

SMALLEST = 1024  # bytes: nearly everything of the models here moves
STEPS = 4


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).train()


def data():
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 512, (32,), generator=random) for _ in range(16)]
    return [{"input_ids": row, "labels": row} for row in rows]


class Mapped(TrainerCallback):
    """Notes whether a state is mapped from a file while the run goes on."""

    found = False

    def on_step_begin(self, args, state, control, **kwargs):
        self.found = self.found or "optimizer.pt" in Path("/proc/self/maps").read_text()


def trained(folder, params="none", optimizer="none", resume=None, **arguments):
    """A Trainer that has trained."""
    if "ssd" in (params, optimizer):
        arguments["offload_directory"] = str(folder.parent)
    if optimizer != "none" and arguments.get("max_grad_norm") == 0:
        arguments["offload_update_in_backward"] = True
    settings = {
        "max_steps": STEPS, "learning_rate": 1e-3, "warmup_steps": 2, "logging_steps": 1, "eval_strategy": "steps",
        "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "offload_params": params,
        "offload_optimizer": optimizer, "offload_min_bytes": SMALLEST,
    }  # fmt: skip
    trainer = make_trainer(folder, gpt2(), data=data(), **settings | arguments)
    mapped = Mapped()
    trainer.add_callback(mapped)
    trainer.train(resume_from_checkpoint=resume)
    assert not mapped.found
    return trainer


def values(trainer):
    kept = ("loss", "grad_norm", "eval_loss", "learning_rate", "step")
    logged = [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return logged, weights, trainer.optimizer.state_dict()


WAYS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "in_backward": {"max_grad_norm": 0.0},
    "bf16": {"bf16": True, "activation_checkpointing": True},
    "best_model": {"load_best_model_at_end": True},
    "not_fused": {"optim": "adamw_torch"},
    "activations": {"offload": "ssd"},
    "tiled_loss": {"tiled_loss": "on"},
    "elementwise": {"recompute_elementwise": "exact"},
    "sampled": {"sampled_linear": 0.5},
    "lora": {"memory_mode": "lora", "memory_mode_kwargs": '{"rank": 4}'},
    "dora": {"memory_mode": "dora", "memory_mode_kwargs": '{"rank": 4}'},
}
# The plain run in all places, and the other ways in turns; steps in backward are those of an optimizer that streams.
TABLE = [
    ("plain", "ssd", "none"), ("plain", "none", "ssd"), ("plain", "ssd", "ssd"), ("plain", "ram", "ram"),
    ("accumulated", "ssd", "ssd"), ("in_backward", "none", "ssd"), ("in_backward", "ssd", "ssd"), ("bf16", "ssd", "ssd"),
    ("best_model", "ssd", "none"), ("not_fused", "none", "ram"), ("activations", "ssd", "ssd"), ("tiled_loss", "ram", "ram"),
    ("elementwise", "ssd", "none"), ("sampled", "none", "ssd"), ("lora", "ssd", "ssd"), ("dora", "ram", "ram"),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs_in_memory():
    """By their ways."""
    return {}


@pytest.mark.parametrize(("way", "params", "optimizer"), TABLE)
def test_a_trainer_has_the_bits_of_the_run_in_memory_and_resumes_either_way(
    way, params, optimizer, runs_in_memory, tmp_path_factory
):
    arguments, folder = WAYS[way], tmp_path_factory.mktemp("runs")
    if way not in runs_in_memory:
        plain = trained(folder / "memory", **arguments)
        runs_in_memory[way] = values(plain), plain.evaluate()["eval_loss"], folder / "memory"
    expected, eval_loss, memory = runs_in_memory[way]
    trainer = trained(folder / "run", params, optimizer, **arguments)
    callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, OffloadCallback))
    if params != "none":
        residency = weights_of(trainer.model)
        assert residency.store.tier.stats.written_bytes > 0
        # With all state in memory, a step takes all trained weights at once.
        if params == "ssd" and (optimizer != "none" or "memory_mode" in arguments):
            assert residency.most_bytes < residency.total_bytes
    if optimizer != "none":
        said = [line for line in callback.summary if line.startswith("Optimizer state: ")]
        assert f"written to {optimizer}" in said[0]
    assert same(expected, values(trainer))
    assert eval_loss == trainer.evaluate()["eval_loss"]
    name = "checkpoint-2"
    if "memory_mode" not in arguments:
        files = [torch.load(each / name / "optimizer.pt", weights_only=True) for each in (memory, folder / "run")]
        assert same(*files)
    resumes = [(folder / "run", params, optimizer), (folder / "run", "none", "none"), (memory, params, optimizer)]
    if way not in ("plain", "lora"):  # the files are those of the run in memory
        resumes = resumes[:1]
    for number, (source, *places) in enumerate(resumes):
        resumed = trained(folder / f"resumed-{number}", *places, str(source / name), **arguments)
        assert same(expected[1:], values(resumed)[1:])


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
def test_a_plan_for_a_budget_counts_what_stays_in_memory(place, tmp_path):
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = sum(p.nbytes for p in model.parameters())
    config = OffloadConfig(tier="auto", memory_budget="1GiB", optimizer=place, min_bytes=4096, directory=tmp_path)
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


class ComputesItself(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_what_is_automatic_leaves_state_of_unknown_classes_in_memory_and_says_why(tmp_path, caplog):
    settings = {"optimizer": "auto", "memory_budget": "1MiB"}
    found = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)))
        optimizer, losses, session = ComputesItself(model.parameters()), [], None
        if offloads:
            session = attach(model, OffloadConfig(directory=tmp_path, min_bytes=1024, **{"tier": "none", **settings}))
            session.prepare_optimizer(optimizer)
        for number in range(3):
            loss = model(torch.full((8, 128), 0.1 * number)).square().mean()
            with caplog.at_level(logging.INFO, "hf_offload"):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                if session is not None:
                    session.end_step()
        if session is not None:
            assert not session.streams_optimizer
            session.detach()
        found.append([losses, [p.detach().clone() for p in model.parameters()]])
    assert same(*found)
    reason = "ComputesItself is not known to step each weight by itself"
    assert any("stay in memory" in message and reason in message for message in caplog.messages)


@pytest.mark.parametrize("mode", ["lisa", "badam", "apollo_mini", "frugal", "galore"])
def test_optimizers_of_memory_modes_have_the_bits_of_the_run_in_memory(mode, tmp_path):
    kwargs = {"galore": {"rank": 4}, "lisa": {"blocks_active": 1, "switch_every": 1}, "badam": {"switch_every": 1}}
    found = []
    for place in ("none", "ssd"):
        model = gpt2().eval()
        files = {} if place == "none" else {"directory": tmp_path}
        asked = {"memory_mode": mode, "memory_mode_kwargs": kwargs.get(mode), "optimizer": place, "min_bytes": 256}
        session = attach(model, OffloadConfig(tier="none", **asked, **files))
        optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(5):
            tokens = torch.arange(16)[None] + step
            model(input_ids=tokens, labels=tokens).loss.backward()
            session.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append(copied([model.state_dict(), optimizer.state_dict()]))
        assert (streaming_of(optimizer) is not None) == (place == "ssd")
        session.detach()
    assert same(*found)
