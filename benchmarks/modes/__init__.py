"""The benchmark of memory modes: the search for learning rates, the runs, their costs and their table."""
