"""How long a choice over activations, weights, gradients and state takes, for models of 80 layers at several budgets."""

import sys
import time
from typing import Annotated

import torch
import typer

from hf_offload.cli.console import clear_errors, output, progress_bar
from hf_offload.forecast.workload import count_choices
from hf_offload.forecast.workload_sources import find_workload
from hf_offload.plan.choosing import choose
from hf_offload.plan.hardware import describe_hardware
from hf_offload.plan.problem import make_problem
from hf_offload.plan.state_placement import Allowed
from hf_offload.reports.formats import markdown_table

MODELS = {
    "llama/70b_lora_auto": (),
    "llama-8b-layers4": ("model.config.num_hidden_layers=80",),
}
"""The first has adapters, the second is trained in full."""
SHARES = (0.80, 0.50, 0.30, 0.15, 0.08)


def choices(
    recipes: Annotated[list[str] | None, typer.Argument(help="Recipes whose models are planned.")] = None,
    gpu: Annotated[str, typer.Option(help="A card, as `hf-offload plan` takes it.")] = "rtx4090",
    ssd: Annotated[str, typer.Option(help="The drive's bandwidth.")] = "7GB/s",
    ram: Annotated[str, typer.Option(help="RAM.")] = "256GB",
) -> None:
    """Plan models of 80 layers within 80 to 8 % of their peak in memory: seconds of one core, and of the planned step."""
    torch.set_num_threads(1)
    rows = []
    with clear_errors():
        hardware = describe_hardware(gpu, ssd=ssd, ram=ram)
        models = MODELS if recipes is None else dict.fromkeys(recipes, ())
        with progress_bar() as progress:
            task = progress.add_task("", total=len(models))
            for name, overrides in models.items():
                progress.update(task, description=name)
                counted = count_choices(find_workload(name, overrides), hardware)
                kept = make_problem(counted, hardware, sys.maxsize).kept
                for share in SHARES:
                    began_s = time.process_time()
                    found = choose(counted, hardware, int(share * kept.timeline.must_fit_bytes), Allowed())
                    took_s = time.process_time() - began_s
                    step = "-" if found is None else f"{found.step_s:.2f} s"
                    rows.append([name, f"{share:.0%}", f"{took_s:.2f} s", step])
                progress.advance(task)
    output().print(
        markdown_table(("model", "budget", "choice", "step"), rows), markup=False, highlight=False, soft_wrap=True
    )
