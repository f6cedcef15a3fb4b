"""How long a row of tokens fits a card as one lever after the other is pulled."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from benchmarks.console import names_of
from hf_offload.cli.console import clear_errors, make_table, print_table, spinner, write_json
from hf_offload.cli.options import Json, Overrides
from hf_offload.errors import OffloadConfigError, OffloadPlanError
from hf_offload.forecast.scaling import Family
from hf_offload.forecast.workload import Workload, count_workload
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.plan.choosing import problem_of
from hf_offload.plan.footprint import Footprint
from hf_offload.plan.hardware import BUDGET_SHARE, Hardware, describe_hardware
from hf_offload.plan.plan import Placement
from hf_offload.plan.problem import Choices
from hf_offload.plan.search import largest
from hf_offload.plan.state_placement import IN_MEMORY, Allowed, StatePlacement
from hf_offload.transforms.tiling.cut import Cut

PIECES = (128, 16)
"""Of the loss and of every MLP, for any number of tokens: what is counted at several lengths has to be alike."""

_MOST_TOKENS = 1 << 24
_LENGTHS = (4096, 8192, 16384)
_BOUNDARIES = (Placement.RECOMPUTE_RAM, Placement.RECOMPUTE_SSD)
_IN_RAM = StatePlacement("ram", "ram")


@dataclasses.dataclass(frozen=True)
class Lever:
    """What is done from here on, on top of what came before: a change of the workload, or a placement of every unit.

    ``placement`` is where weights, gradients and state are.
    """

    name: str
    changes: Mapping[str, Any]
    placements: tuple[Placement, ...]
    state_placement: StatePlacement = IN_MEMORY


LEVERS = (
    Lever("no offloading", {}, (Placement.KEEP,)),
    Lever("checkpoint every block", {}, (Placement.RECOMPUTE,)),
    Lever("the blocks' inputs in RAM or on SSD", {}, _BOUNDARIES),
    Lever("tiled loss", {"tiled_loss": "on"}, _BOUNDARIES),
    Lever("tiled MLP", {"tiled_mlp": "on"}, _BOUNDARIES),
    Lever("weights and state in RAM", {}, _BOUNDARIES, _IN_RAM),
    Lever("LoRA instead of all weights", {"memory_mode": "lora", "memory_mode_kwargs": {}}, _BOUNDARIES, _IN_RAM),
)


@dataclasses.dataclass(frozen=True)
class Reach:
    """The longest row that fits with a lever and all before it, for each machine; 0 where not even one token does."""

    lever: str
    tokens: tuple[int, ...]


def pull_levers(
    workload: Workload, machines: Sequence[Hardware], on_lever: Callable[[str], None] = lambda name: None
) -> list[Reach]:
    """One lever after the other, for rows of ``workload.batch``.

    Raises :class:`~hf_offload.errors.OffloadConfigError` for a model with few positions, and
    :class:`~hf_offload.errors.OffloadPlanError` if the model cannot be counted, or not at all lengths alike.
    """
    longest = getattr(workload.config, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < _LENGTHS[-1]:
        raise OffloadConfigError(
            f"{workload.name} has {longest} positions: the length of its rows is not limited by memory."
        )
    found = []
    now = dataclasses.replace(workload, cut=Cut(exactly=PIECES))
    family: Family | None = None
    for lever in LEVERS:
        on_lever(lever.name)
        if family is None or lever.changes:
            now = now.changed(**lever.changes)
            family = _family(now, machines[0])
        tokens = tuple(_longest(family, machine, now.batch, lever) for machine in machines)
        found.append(Reach(lever.name, tokens))
    return found


def _family(workload: Workload, hardware: Hardware) -> Family:
    def counted(length: int) -> Footprint:
        # The same tensors are to be moved at all lengths, so what counts as small grows along.
        small = workload.settings.smallest_bytes(hardware.device == "cpu") * length // _LENGTHS[1]
        return count_workload(workload.changed(sequence=length, min_bytes=small), hardware)

    first, *others = ((length, counted(length)) for length in _LENGTHS)
    family = Family(workload.batch, *first, others)
    if not family.knows_lengths:
        raise OffloadPlanError(
            f"{workload.name} runs other operations with {_LENGTHS[-1]} tokens than with fewer, so longer rows "
            "cannot be predicted."
        )
    return family


def _longest(family: Family, hardware: Hardware, batch: int, lever: Lever) -> int:
    budget = int(hardware.memory_bytes.value * BUDGET_SHARE)

    def fits(tokens: int) -> bool:
        footprint: Footprint = family.at(batch, tokens)
        problem = problem_of(footprint, hardware, budget, lever.state_placement, Allowed())
        if "ram" not in problem.room_bytes or min(problem.room_bytes.values()) < 0:  # they do not fit there
            problem = problem_of(footprint, hardware, budget, IN_MEMORY, Allowed())
        choices = Choices(problem)
        return any(  # in the narrowest windows: it is not about time
            problem.fits(problem.play(choices.uniform(placement), problem.windows[-1]))
            for placement in lever.placements
            if placement in choices.options
        )

    return largest(fits, 1024, _MOST_TOKENS)


def lengths(
    model: Annotated[str, typer.Argument(help="A model, as `hf-offload plan` takes it.")],
    overrides: Overrides = None,
    gpus: Annotated[str, typer.Option(help="GPUs, separated by commas.")] = "rtx4090,l40s,h100-80gb,h200",
    batch: Annotated[int | None, typer.Option(help="Rows of a micro-batch. Default: the recipe's, or 1.")] = None,
    ram: Annotated[str | None, typer.Option(help="RAM that activations may take, such as 64GB.")] = None,
    ssd: Annotated[str | None, typer.Option(help="Bandwidth of the drive, such as 5GB/s.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk space that activations may take, such as 500GB.")] = None,
    json: Json = False,
) -> None:
    """Show the longest row that fits each of several GPUs, with one measure on top of the other."""
    with clear_errors():
        workload = find_workload(model, overrides or [], batch=batch)
        machines = [describe_hardware(gpu, ram=ram, ssd=ssd, disk=disk) for gpu in names_of(gpus)]
        with spinner("Counting") as show:
            found = pull_levers(workload, machines, lambda name: show(f"Counting: {name}"))
    names = [machine.name for machine in machines]
    if json:
        rows = [{"lever": one.lever, "tokens": dict(zip(names, one.tokens, strict=True))} for one in found]
        write_json({"model": workload.name, "batch": workload.batch, "levers": rows})
        return
    table = make_table(
        f"{workload.name}: tokens of the longest row that fits, batch {workload.batch}",
        ("in addition", *names),
        f"Predicted; 90 % of a GPU's memory. Loss in {PIECES[0]} pieces, MLPs in {PIECES[1]}. -: weights, gradients and "
        "optimizer state alone do not fit. What the blocks' inputs may take of RAM and disk: --ram and --disk.",
    )
    for one in found:
        table.add_row(escape(one.lever), *(f"{tokens:,}" if tokens else "-" for tokens in one.tokens))
    print_table(table)
