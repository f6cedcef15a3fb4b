"""``python -m tests.fuzz --count 100000``: random autograd programs, with and without the engine.

They come from a plain source of random numbers, which is quicker than hypothesis and does not shrink; the suite runs fewer,
drawn by hypothesis. ``--seed N`` repeats one.
"""

import sys

from tests.fuzz.runs import run
from tests.helpers.seed_search import try_seeds

if __name__ == "__main__":
    sys.exit(try_seeds(run, "tests.fuzz"))
