"""What a recipe is predicted to need and take on the machine that its section ``meta`` names."""

import dataclasses
from collections.abc import Mapping

from hf_offload.errors import OffloadConfigError
from hf_offload.forecast.workload import count_workload
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.plan.choosing import Choice
from hf_offload.plan.explain import categories_of
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import BUDGET_SHARE, Hardware, describe_hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Solution, make_problem
from hf_offload.plan.refusal import find_choice
from hf_offload.plan.search import solve, uniform
from hf_offload.settings.recipe_meta import Predicted
from hf_offload.settings.recipes import Recipe, load_recipe
from hf_offload.settings.sizes import format_seconds

_PLACEMENTS: Mapping[tuple[str, bool], Placement | None] = {
    ("none", False): Placement.KEEP,
    ("ram", False): Placement.RAM,
    ("ssd", False): Placement.SSD,
    ("auto", False): None,
    ("none", True): Placement.RECOMPUTE,
    ("ram", True): Placement.RECOMPUTE_RAM,
    ("ssd", True): Placement.RECOMPUTE_SSD,
}
"""Tier, and whether blocks are recomputed -> the row of ``hf-offload plan``; None for the plan itself."""

_TIERS = (("ram", "ram"), ("ssd", "drive"))


@dataclasses.dataclass(frozen=True)
class RecipePrediction:
    """Of one micro-batch with the optimizer's step.

    Attributes:
        machine: In words.
        micro_batches: Of a step, ``gradient_accumulation_steps``.
        budget_bytes: Most memory that counts as fitting.
        peak_bytes, step_s: Of the recipe as it is.
        kept_peak_bytes, kept_step_s: If every activation were kept.
        planned_step_s: With ``offload.tier=auto``, if the recipe has another tier and a plan fits.
        tier_bytes: Where weights or state leave memory: all that lies in each tier.
        tokens: Of a micro-batch, where they count.
    """

    machine: str
    micro_batches: int
    budget_bytes: int
    peak_bytes: int
    step_s: float
    kept_peak_bytes: int
    kept_step_s: float
    planned_step_s: float | None
    tier_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tokens: int = 0

    @property
    def written(self) -> Predicted:
        """As it is written into a recipe."""
        fits = self.kept_peak_bytes <= self.budget_bytes
        return Predicted(
            peak=_gib(self.peak_bytes),
            budget=_gib(self.budget_bytes),
            micro_batch=format_seconds(self.step_s),
            baseline_peak=_gib(self.kept_peak_bytes),
            baseline_micro_batch=format_seconds(self.kept_step_s) if fits else None,
            auto_micro_batch=None if self.planned_step_s is None else format_seconds(self.planned_step_s),
            **self._moved,
        )

    @property
    def _moved(self) -> dict[str, str]:
        if not self.tier_bytes:
            return {}
        found = {name: _gib(nbytes) for tier, name in _TIERS if (nbytes := self.tier_bytes.get(tier))}
        if self.tokens:
            found["million_tokens"] = f"{self.step_s * 1e6 / self.tokens / 3600:.1f} h"
        return found

    @property
    def line(self) -> str:
        """In a sentence."""
        found = self.written
        step = f"step {found.micro_batch}"
        if self.micro_batches > 1:
            step = f"{found.micro_batch} a micro-batch, {self.micro_batches} a step"
        planned = "" if found.auto_micro_batch is None else f"; tier auto: {found.auto_micro_batch}"
        moved = "".join(f"; {name.replace('_', ' ')}: {value}" for name, value in self._moved.items())
        return (
            f"on {self.machine}: peak {found.peak} of {found.budget}, {step}; no offloading: {found.baseline_peak}, "
            f"{found.baseline_micro_batch or 'does not fit'}{planned}{moved}"
        )


def predict_recipe(name: str) -> RecipePrediction:
    """The prediction for a recipe, by name or file, on the machine it is meant for.

    Raises :class:`~hf_offload.errors.OffloadError` if it names none, or if it does not fit there.
    """
    recipe = load_recipe(name)
    machine = recipe.meta.target.given
    if not machine:
        raise OffloadConfigError(
            f"{name} does not name the machine it is meant for: add meta: {{machine: {{gpu: rtx4090, ssd: 5GB/s}}}}."
        )
    hardware = describe_hardware(**machine)
    placement = _PLACEMENTS[_way(recipe)]
    workload = find_workload(name)
    budget = workload.budget_bytes or int(hardware.memory_bytes.value * BUDGET_SHARE)
    counted = count_workload(workload, hardware)
    problem = make_problem(counted, hardware, budget)
    kept = uniform(problem, Placement.KEEP)
    chosen: Solution | None
    choice: Choice | None = None
    if placement is None:
        choice = find_choice(counted, hardware, budget, workload.allowed)
        problem, chosen = choice.problem, choice.solution
    else:
        chosen = uniform(problem, placement)
    planned = None if placement is None else solve(problem)
    if chosen is None or kept is None:
        raise OffloadConfigError(f"{name} places activations in a way that cannot be predicted.")
    if not problem.fits(chosen):
        raise OffloadConfigError(
            f"{name} does not fit {hardware.name}: its predicted peak is {_gib(chosen.timeline.peak_bytes)}, and "
            f"{_gib(budget)} may be used. Change the recipe, or its meta.machine."
        )
    return RecipePrediction(
        machine=_words(hardware),
        micro_batches=int(recipe.training.get("gradient_accumulation_steps") or 1),
        budget_bytes=budget,
        peak_bytes=chosen.timeline.peak_bytes,
        step_s=chosen.timeline.step_s,
        kept_peak_bytes=kept.timeline.peak_bytes,
        kept_step_s=kept.timeline.step_s,
        planned_step_s=None if planned is None else planned.timeline.step_s,
        tier_bytes={} if choice is None or not choice.state_placement.moves else _lying(choice, counted),
        tokens=workload.batch * workload.sequence if workload.length_unit == "tokens" else 0,
    )


def _lying(choice: Choice, counted: Footprint) -> dict[str, int]:
    categories = categories_of(counted, choice.problem, choice.state_placement, choice.solution)
    return {tier: sum(category.tiers.get(tier, 0) for category in categories) for tier, _ in _TIERS}


def _way(recipe: Recipe) -> tuple[str, bool]:
    # two names of the same: older and newer versions of transformers
    again = bool(recipe.training.get("gradient_checkpointing") or recipe.training.get("activation_checkpointing"))
    return recipe.offload.tier, again and recipe.offload.tier != "auto"


def _words(hardware: Hardware) -> str:
    ssd, link = hardware.store_bytes_per_s["ssd"].value, hardware.store_bytes_per_s["ram"].value
    return f"{hardware.name} (ssd {ssd / 1e9:g} GB/s, PCIe {link / 1e9:g} GB/s)"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
