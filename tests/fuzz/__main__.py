"""``python -m tests.fuzz --graphs 100000``: random autograd programs, with and without the engine.

They come from a plain source of random numbers, which is quicker than hypothesis and does not shrink; the suite runs fewer,
drawn by hypothesis. ``--seed N`` repeats one.
"""

from typing import Annotated

import typer

from tests.fuzz.runs import run
from tests.helpers.seed_search import try_seeds


def main(
    graphs: Annotated[int, typer.Option("--graphs", "--count", help="How many programs.")] = 100_000,
    first: Annotated[int, typer.Option(help="The seed of the first.")] = 0,
    seed: Annotated[int | None, typer.Option(help="This seed only.")] = None,
    stop: Annotated[bool, typer.Option(help="Stop at the first that fails.")] = False,
) -> None:
    """Look for programs whose gradients or errors are not plain autograd's."""
    if seed is not None:
        first, graphs = seed, 1
    try_seeds(run, "tests.fuzz", first, graphs, stop)


if __name__ == "__main__":
    typer.run(main)
