"""Weights on a tier, of which those are in memory that an operation uses, and as many more as fit."""
