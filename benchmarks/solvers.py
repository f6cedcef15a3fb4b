"""What each search for a placement is worth: on recipes' models, with less memory than would keep everything."""

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Annotated

import typer

from hf_offload.cli.console import clear_errors, output, progress_bar
from hf_offload.forecast.workload import count_workload
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.plan.hardware import describe_hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.planner import make_problem
from hf_offload.plan.problem import Problem, Solution, smallest_budget
from hf_offload.plan.search import find_greedy, find_uniform, local_search, smallest, solve, uniform
from hf_offload.reports.formats import markdown_table

RECIPES = (
    "bert/base_full_ssd",
    "bert/large_wtacrs_ram",
    "gpt/gpt2_xl_lora_ssd",
    "gpt/pythia_1b_full_ssd",
    "gpt/pythia_6_9b_qlora_auto",
    "llama/1b_lora_ssd",
    "t5/base_wtacrs_ram",
    "t5/large_galore_ssd",
)
SHARES = (0.15, 0.5, 0.85)
"""Of the way from the smallest budget that does to the one that keeps everything."""
SEARCHES = ("uniform", "greedy", "uniform, improved", "greedy, improved", "both, improved")


def problems(name: str, gpu: str, ssd: str) -> Iterator[Problem]:
    """What a recipe's step would have to do within several budgets."""
    hardware = describe_hardware(gpu, ssd=ssd)
    problem = make_problem(count_workload(find_workload(name), hardware), hardware, int(hardware.memory_bytes.value))
    least = smallest(problem).timeline.must_fit_bytes
    kept = uniform(problem, Placement.KEEP)
    assert kept is not None, "every model can be kept where memory has no end"
    for share in SHARES:
        budget = smallest_budget(int(least + (kept.timeline.must_fit_bytes - least) * share))
        yield dataclasses.replace(problem, budget_bytes=budget)


def steps(problem: Problem) -> dict[str, float]:
    """Search -> seconds of the step that it finds; not there where it finds none."""
    alike, mixed = find_uniform(problem), find_greedy(problem)
    improved: list[Solution | None] = [local_search(problem, alike), local_search(problem, mixed), solve(problem)]
    found = [alike, mixed, *([] if one is None else [one] for one in improved)]
    return {name: min(one.timeline.step_s for one in of) for name, of in zip(SEARCHES, found, strict=True) if of}


def compare(everyone: list[dict[str, float]]) -> list[list[str]]:
    """Search, problems that it solves, and the mean and the worst ratio of its step to the best of all searches."""
    rows = []
    for name in SEARCHES:
        ratios = [found[name] / min(found.values()) for found in everyone if name in found]
        if ratios:
            rows.append([name, str(len(ratios)), f"{statistics.mean(ratios):.3f}", f"{max(ratios):.3f}"])
    return rows


def solvers(
    recipes: Annotated[list[str] | None, typer.Argument(help="Recipes whose models are planned.")] = None,
    gpu: Annotated[str, typer.Option(help="A card, as `hf-offload plan` takes it.")] = "rtx4090",
    ssd: Annotated[str, typer.Option(help="The drive's bandwidth.")] = "5GB/s",
) -> None:
    """Compare the searches for a placement: mean and worst ratio to the best of them."""
    with clear_errors():
        everyone: list[dict[str, float]] = []
        names = recipes or RECIPES
        with progress_bar() as progress:
            task = progress.add_task("", total=len(names))
            for name in names:
                progress.update(task, description=name)
                everyone += map(steps, problems(name, gpu, ssd))
                progress.advance(task)
        table = markdown_table(("search", "problems", "mean", "worst"), compare(everyone))
        output().print(table, markup=False, highlight=False, soft_wrap=True)
