"""Weights, gradients and optimizer state on tiers, on twenty architectures of transformers, with all that a training does.

Losses, norms, weights, state, an evaluation and generated tokens are those of the run in memory, also of a run that was
resumed half way.
"""

import contextlib
import dataclasses
import itertools

import peft
import pytest
import torch
from torch import nn

from tests.helpers.architectures import ARCHITECTURES, generate, make_batch, make_model
from tests.helpers.tables import rows
from tests.helpers.train import Run, copied, same

STEPS = 4


@dataclasses.dataclass(frozen=True)
class Way:
    """What is where, and how it is trained. Of ``checkpointed``, True is reentrant."""

    params: str = "none"
    optimizer: str = "none"
    lora: bool = False
    precision: str = "float32"
    checkpointed: bool | None = None
    fused: bool = False
    clipped: bool = False
    backwards: int = 1


WAYS = {
    "weights-ssd-checkpointed": Way("ssd", checkpointed=True),
    "state-ram-autocast-accumulated": Way("none", "ram", precision="autocast", fused=True, backwards=3),
    "weights-ram-lora-clipped": Way("ram", lora=True, clipped=True, checkpointed=False),
    "state-ssd-bfloat16-clipped": Way("none", "ssd", precision="bfloat16", clipped=True, backwards=2),
    "all-ssd-clipped": Way("ssd", "ssd", fused=True, clipped=True, checkpointed=False),
    "state-ssd-checkpointed": Way("none", "ssd", checkpointed=True, fused=True),
    "all-ram-autocast": Way("ram", "ram", precision="autocast", checkpointed=True, backwards=2),
    "all-ssd-lora-bfloat16": Way("ssd", "ssd", lora=True, precision="bfloat16"),
}
TABLE = list(itertools.product(ARCHITECTURES, WAYS))
# Each architecture in one way, and each way in turns.
QUICK = [
    (name, way)
    for place, name in enumerate(ARCHITECTURES)
    for number, way in enumerate(WAYS)
    if (number - 3 * place) % len(WAYS) == 0
]


class Training:
    """A model, its optimizer and schedule, and the steps that they have made."""

    def __init__(self, name, way, run):
        self.name, self.way, self.run = name, way, run
        torch.manual_seed(1)
        model = make_model(name)
        if way.lora:
            targets = (
                ["in_proj", "x_proj", "embeddings"] if name == "mamba" else "all-linear"
            )  # which it does not allow
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        if way.precision == "bfloat16":
            model.to(torch.bfloat16)
        if way.checkpointed is not None and model.supports_gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": way.checkpointed})
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.model = model
        self.optimizer = run.prepare(model, torch.optim.AdamW(groups, lr=1e-2, fused=way.fused))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1, (step + 1) / 3))
        torch.manual_seed(11)  # of dropout

    def batch(self, seed):
        batch = make_batch(self.name, seed)
        if self.way.precision != "bfloat16":
            return batch
        return {key: value.to(torch.bfloat16) if value.is_floating_point() else value for key, value in batch.items()}

    def train(self, first, last):
        autocast = self.way.precision == "autocast"
        for step in range(first, last):
            for number in range(self.way.backwards):
                with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
                    loss = self.model(**self.batch(step * self.way.backwards + number)).loss
                (loss / self.way.backwards).backward()
                self.run.log(loss)
            if self.way.clipped:
                self.run.log(self.run.clip(self.model, 0.1))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return self

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            output = self.model(**self.batch(100))
            self.run.log({key: value for key, value in output.items() if torch.is_tensor(value)})
            if self.way.precision != "bfloat16":
                self.run.log(generate(self.name, self.model, seed=101))
        self.run.log_all(self.model, self.optimizer)
        return self

    def save(self):
        return copied(
            [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        ), torch.get_rng_state()

    def load(self, saved):
        states, random = saved
        for one, state in zip((self.model, self.optimizer, self.scheduler), states, strict=True):
            one.load_state_dict(state)
        torch.set_rng_state(random)
        return self


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "way"), rows(TABLE, quick=QUICK))
def test_a_run_and_a_resumed_run_have_the_bits_of_the_run_in_memory(name, way, tmp_path):
    way = WAYS[way]

    def run(**places):
        return Run(places.pop("optimizer", "none"), tmp_path, min_bytes=256, **places)

    places = {"params": way.params, "optimizer": way.optimizer}
    expected, found, resumed = run(), run(**places), run(**places)
    Training(name, way, expected).train(0, STEPS).evaluate()
    training = Training(name, way, found).train(0, STEPS // 2)
    saved = training.save()
    done = len(found.logged)
    training.train(STEPS // 2, STEPS).evaluate()
    assert same(expected.logged, found.logged)
    residency = found.session.residency
    if residency is not None:
        assert residency.most_bytes > 0
        if name != "swin":  # of whose blocks two may be as large as all
            assert residency.most_bytes < residency.total_bytes
        assert residency.store.tier.stats.read_bytes > residency.total_bytes
    assert found.written_bytes() > sum(p.nbytes for p in training.optimizer.param_groups[0]["params"]) / 2
    Training(name, way, resumed).load(saved).train(STEPS // 2, STEPS).evaluate()
    assert same(expected.logged[done:], resumed.logged)


def test_clipping_takes_what_pytorch_s_takes(tmp_path):
    """Accelerate calls it with parameters, by position or by name."""
    calls = [
        lambda session, model: session.clip_grad_norm_(1e-3),
        lambda session, model: session.clip_grad_norm_(max_norm=1e-3, norm_type=2.0),
        lambda session, model: session.clip_grad_norm_(model.parameters(), 1e-3),
        lambda session, model: session.clip_grad_norm_(parameters=list(model.parameters()), max_norm=1e-3),
        lambda session, model: session.clip_grad_norm_(model.lm_head.weight, 1e-3),
    ]
    plain = [lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3)] * 4
    plain.append(lambda model: nn.utils.clip_grad_norm_(model.lm_head.weight, 1e-3))
    for clip, clip_plainly in zip(calls, plain, strict=True):
        model = make_model("gpt2").eval()
        model(**make_batch("gpt2", 0)).loss.backward()
        norm, gradients = clip_plainly(model), [one.grad for one in model.parameters()]
        run, model = Run("ssd", tmp_path), make_model("gpt2").eval()
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        model(**make_batch("gpt2", 0)).loss.backward()
        assert torch.equal(clip(run.session, model), norm)
        assert same([one.grad for one in model.parameters()], gradients)
