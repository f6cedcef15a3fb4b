"""Weights on a tier: which of them are in memory, in which order they are used, and which models cannot do without.

Nothing here knows optimizers or steps: a weight comes when an operation or backward asks for it.
"""
