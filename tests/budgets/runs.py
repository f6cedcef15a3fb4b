"""A training under a budget, with what an independent meter of live bytes says about each of its steps."""

import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.budgets.meter import Meter
from hf_offload import OffloadConfig, offload_activations
from hf_offload.errors import OffloadPlanError
from tests.budgets.models import batch, build, loss
from tests.helpers.heard import listening, named_later

STEPS = 7
# How far a prediction may be off: of runs that keep or recompute, and of others.
EXACT, ROUGH = 0.05, 0.10


@dataclasses.dataclass
class Scenario:
    """How a model is trained: with micro-batches of so many ``rows`` in a step. ``prepare`` may change the model,
    ``before_step`` is called with the index of each step.
    """

    rows: Callable[[int], tuple[int, ...]] = lambda step: (16,)
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    before_step: Callable[[nn.Module, int], None] = lambda model, step: None
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda weights: torch.optim.AdamW(weights, lr=1e-3)
    set_to_none: bool = True
    autocast: bool = False


def _lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    # peft refuses the layers of a Mamba block whose weights its fused kernels read.
    targets = (
        ["in_proj", "x_proj"] if getattr(getattr(model, "config", None), "model_type", "") == "mamba" else "all-linear"
    )
    return get_peft_model(model, LoraConfig(r=8, target_modules=targets))  # type: ignore[arg-type]


def _half_frozen(model: nn.Module) -> nn.Module:
    weights = list(model.parameters())
    for parameter in weights[: len(weights) // 2]:
        parameter.requires_grad_(False)
    return model


def _thaw(model: nn.Module, step: int) -> None:
    if step == 3:
        model.requires_grad_(True)


def _adafactor(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(weights, lr=1e-3)


SCENARIOS = {
    "plain": Scenario(),
    "lora": Scenario(prepare=_lora),
    "large_then_small": Scenario(rows=lambda step: (24, 8)),
    "small_then_large": Scenario(rows=lambda step: (8, 24)),
    "growing": Scenario(rows=lambda step: (12 if step % 4 < 2 else 20,)),
    "unfreezing": Scenario(prepare=_half_frozen, before_step=_thaw),
    "autocast": Scenario(autocast=True),
    "gradients_stay": Scenario(set_to_none=False),
    "sgd": Scenario(optimizer=lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9)),
    "adafactor": Scenario(optimizer=_adafactor),
    "fused_adam": Scenario(optimizer=lambda weights: torch.optim.Adam(weights, lr=1e-3, fused=True)),
}


@dataclasses.dataclass
class Run:
    """Losses and, per step, the most bytes alive, and what the plan that was in force at its end was predicted to need."""

    losses: list[float]
    weights: list[torch.Tensor]
    peaks: list[int]
    predicted: list[int]
    fixed: int
    placed: str = ""


def train(name: str, scenario: Scenario, config: OffloadConfig, steps: int = STEPS) -> Run:
    """Train, and meter each step."""
    gc.collect()
    meter = Meter()
    before = meter.live()
    model = scenario.prepare(build(name))
    torch.manual_seed(1)
    optimizer = scenario.optimizer(list(model.parameters()))
    losses, peaks, predicted = [], [], []
    with offload_activations(model, config) as session:
        for step in range(steps):
            scenario.before_step(model, step)
            meter.peak()
            for rows in scenario.rows(step):
                inputs = batch(name, rows, seed=step)
                with torch.autocast("cpu", torch.bfloat16, enabled=scenario.autocast):
                    value = loss(model, inputs)
                value.backward()
                losses.append(value.item())
                del value, inputs
            optimizer.step()
            optimizer.zero_grad(set_to_none=scenario.set_to_none)
            session.end_step()
            peaks.append(meter.peak() - before)
            predicted.append(0 if session.forecast is None else session.forecast.peak_bytes)
        placed = session.plan.reason
    fixed = _bytes_of(model) + sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return Run(losses, weights, peaks, predicted, fixed, placed)


def _bytes_of(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})


@dataclasses.dataclass
class Outcome:
    """A run under a budget, beside one that keeps everything."""

    share: float
    budget: int
    keep: Run
    run: Run
    refusals: int

    @property
    def worst(self) -> float:
        """The most that a step after the first had alive, as a share of the budget."""
        return max(self.run.peaks[1:]) / self.budget

    @property
    def error(self) -> float:
        """What was predicted of the last plan that was followed for a step, beside what was metered then."""
        predicted = self.run.predicted
        # The first step with a prediction may be the one that its plan was made from.
        followed = [index for index in range(1, len(predicted)) if predicted[index] in predicted[:index]]
        last = predicted[followed[-1]] if followed else predicted[-1]
        steps = [index for index in followed if predicted[index] == last] or [-1]
        return last / statistics.median(self.run.peaks[index] for index in steps) - 1

    @property
    def is_same(self) -> bool:
        """Whether losses and weights are those of the other run, to the bit."""
        return self.run.losses == self.keep.losses and all(map(torch.equal, self.run.weights, self.keep.weights))

    @property
    def moves(self) -> bool:
        """Whether the last plan moves anything."""
        return "ssd" in self.run.placed

    def is_right(self, strict: bool) -> bool:
        """Whether the budget was kept and nothing changed; ``strict``: and the prediction was good."""
        tolerance = ROUGH if self.moves else EXACT
        return self.is_same and self.worst <= 1 and not (strict and abs(self.error) > tolerance)

    def __str__(self) -> str:
        most = max(self.keep.peaks[1:]) / self.budget
        return (
            f"{'ok  ' if self.is_right(False) else 'FAIL'} {self.share:.2f} {self.budget / 2**20:6.1f} MiB  keep {most:.2f}  "
            f"worst {self.worst:.3f}  predicted {self.error:+.1%}  {'same' if self.is_same else 'DIFFERENT'}  "
            f"refused {self.refusals}  {[round(peak / self.budget, 3) for peak in self.run.peaks]}  {self.run.placed}"
        )


def budgets(name: str, scenario: Scenario, shares: list[float], directory: Any) -> Iterator[Outcome]:
    """For each share of what activations take, the run under that budget.

    A budget that is refused is replaced by the smallest that the refusal names, and one that later steps do not fit by the
    one that the warning names.
    """
    keep = train(name, scenario, OffloadConfig(tier="none"))
    most = max(keep.peaks[1:])
    for share in shares:
        budget = int(keep.fixed + share * (most - keep.fixed))

        def run(budget: int) -> Run:
            config = OffloadConfig(tier="auto", memory_budget=budget, directory=directory, min_bytes=4096)
            return train(name, scenario, config)

        # What is needed can grow in later steps: where layers are unfrozen, for one.
        found, named, refused_times = None, budget, 0
        while found is None and refused_times < 5:
            refused = named
            with listening() as heard:
                try:
                    found = run(named)
                    later = named_later(heard)
                except OffloadPlanError as error:
                    later = error.smallest_bytes or 0
            if later is not None:
                found, named = None, later
                refused_times += 1
                assert named > refused, heard
        assert found is not None, f"{named} is named, and refused as the others before"
        yield Outcome(share, named, keep, found, refused_times)
