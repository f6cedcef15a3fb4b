"""Models that are made with their weights on a tier: loaded from checkpoints, or drawn at random, one weight at a time.

Nothing here knows sessions or training.
"""
