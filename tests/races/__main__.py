"""``python -m tests.races``: random graphs over the simulated device, as many as asked; ``--seed N`` repeats one."""

import sys

from tests.helpers.seed_search import try_seeds
from tests.races.runs import run

if __name__ == "__main__":
    sys.exit(try_seeds(run, "tests.races"))
