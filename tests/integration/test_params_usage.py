"""Weights on a tier in a Trainer, an Accelerator and a loop of one's own: the bits of the run that keeps them in memory."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer

from hf_offload import OffloadConfig, OffloadTrainingArguments, offload_activations
from hf_offload.state.weights import weights_of
from tests.helpers.tables import rows
from tests.helpers.train import same

SMALLEST = 1024


LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512, use_cache=False
)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=512, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).train()


def data():
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 512, (32,), generator=random) for _ in range(64)]
    return [{"input_ids": row, "labels": row} for row in rows]


def made(folder, params="none", model=None, **arguments):
    directory = (
        {"offload_directory": str(folder.parent)} if "ssd" in (params, arguments.get("offload_optimizer")) else {}
    )
    args = OffloadTrainingArguments(
        output_dir=folder,
        **{
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_steps": 3,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "offload_params": params,
            "offload_min_bytes": SMALLEST,
        }
        | directory
        | arguments,
    )
    return Trainer(model=gpt2() if model is None else model, args=args, train_dataset=data(), eval_dataset=data()[:8])


def logged(trainer):
    kept = ("loss", "grad_norm", "eval_loss", "learning_rate", "step")
    return [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]


def values(trainer):
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return logged(trainer), weights, trainer.optimizer.state_dict()


def trained(folder, params="none", resume=None, **arguments):
    trainer = made(folder, params, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


WAYS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "in_backward": {"max_grad_norm": 0.0},
    "bf16": {"bf16": True, "activation_checkpointing": True},
    "best_model": {"load_best_model_at_end": True, "save_steps": 4},
    "not_fused": {"optim": "adamw_torch"},
    "activations": {"offload": "ssd"},
    "tiled_loss": {"tiled_loss": "on"},
    "elementwise": {"recompute_elementwise": "exact"},
    "sampled": {"sampled_linear": 0.5},
    "lora": {"memory_mode": "lora", "memory_mode_kwargs": '{"rank": 4}'},
    "dora": {"memory_mode": "dora", "memory_mode_kwargs": '{"rank": 4}'},
}


PLACES = [("ssd", "none"), ("ssd", "ssd"), ("ram", "ram")]
ALL = [(way, *places) for way in WAYS for places in PLACES]
# The plain run in every place, and the other ways in turns.
QUICK = [one for number, one in enumerate(ALL) if one[0] == "plain" or number % 3 == number // 3 % 3]


@pytest.mark.parametrize(("way", "place", "optimizer"), rows(ALL, quick=QUICK))
def test_a_trainer_has_the_bits_of_the_run_in_memory_and_resumes_either_way(way, place, optimizer, tmp_path):
    arguments = WAYS[way]
    memory = tmp_path / "memory"
    expected = trained(memory, **arguments)
    trainer = trained(tmp_path / "run", place, offload_optimizer=optimizer, **arguments)
    residency = weights_of(trainer.model)
    assert residency.store.tier.stats.written_bytes > 0
    if place == "ssd" and (
        optimizer != "none" or "memory_mode" in arguments
    ):  # a step takes all trained weights at once
        assert residency.most_bytes < residency.total_bytes
    assert same(values(expected), values(trainer))
    assert expected.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    name = f"checkpoint-{arguments.get('save_steps', 3)}"
    for target, source in [(place, "run"), ("none", "run"), (place, "memory")]:
        folder = tmp_path / f"{target}_{source}"
        state = optimizer if target == place else "none"
        resumed = trained(folder, target, str(tmp_path / source / name), offload_optimizer=state, **arguments)
        assert same(values(expected)[1:], values(resumed)[1:])


@pytest.mark.parametrize("settings", [{"optimizer": "ssd"}, {"params": "ssd"}, {"params": "ssd", "optimizer": "ssd"}])
@pytest.mark.parametrize(
    "transform", [{"tiled_loss": "on"}, {"recompute_elementwise": "exact"}, {"sampled_linear": 0.5}]
)
def test_transforms_know_weights_that_are_elsewhere(transform, settings, tmp_path):
    found = []
    for chosen in ({}, settings | {"directory": tmp_path}):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LLAMA)
        config = OffloadConfig(tier="none", min_bytes=SMALLEST, **transform, **chosen)
        with offload_activations(model, config) as session:
            optimizer = session.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
            session.defer_updates()
            if session.residency is not None:
                session.residency.limit_bytes = 1
            losses, saved = [], Counter()
            for step in range(3):
                tokens = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(step))
                with torch.autograd.graph.saved_tensors_hooks(saved.count, lambda tensor: tensor):
                    loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found.append((losses, {name: value.clone() for name, value in model.state_dict().items()}, saved.nbytes))
    assert same(*found)


class Counter:
    """Bytes of activations that autograd saves."""

    def __init__(self):
        self.nbytes = 0

    def count(self, tensor):
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            self.nbytes += tensor.nbytes
        return tensor


def test_models_that_are_loaded_later_are_those_of_a_process_without_offloading(tmp_path):
    """In a process of its own: transformers is imported after weights have left memory."""
    code = f"""
import torch
from hf_offload import OffloadConfig, attach
model = torch.nn.Linear(64, 64)
attach(model, OffloadConfig(tier="none", params="ssd", min_bytes=1, directory={str(tmp_path)!r}))
model(torch.randn(2, 64)).sum().backward()
from transformers import BertConfig, BertModel
sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=64)
config = BertConfig(max_position_embeddings=16, **sizes)
BertModel(config).save_pretrained({str(tmp_path)!r})
filled = [torch.full((1, 16), 7) for _ in range(100)]
del filled
loaded = BertModel.from_pretrained({str(tmp_path)!r})
assert loaded.embeddings.position_ids.tolist() == [list(range(16))]
with torch.device("meta"):
    assert torch.tensor([1.0]).is_meta and torch.as_tensor([1.0]).is_meta
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
