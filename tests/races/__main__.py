"""``python -m tests.races``: random graphs over the simulated device, as many as asked; ``--seed N`` repeats one."""

from typing import Annotated

import typer

from tests.helpers.seed_search import try_seeds
from tests.races.runs import run


def main(
    count: Annotated[int, typer.Option(help="How many seeds.")] = 10_000,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(help="This seed only.")] = None,
    stop: Annotated[bool, typer.Option(help="Stop at the first seed that fails.")] = False,
) -> None:
    """Look for races between compute, copies, I/O and the engine's threads."""
    if seed is not None:
        first, count = seed, 1
    try_seeds(run, "tests.races", first, count, stop)


if __name__ == "__main__":
    typer.run(main)
