"""The benchmark of weights that leave memory: ours, and what others offer."""
