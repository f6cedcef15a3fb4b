"""Optimizers that need less memory than AdamW: projected gradients, and blocks of weights that take turns.

Nothing here knows the Trainer or memory modes, which choose among them.
"""
