"""The benchmark of optimizer state and gradients that leave memory: ours, and what others offer."""
