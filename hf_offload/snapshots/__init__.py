"""Snapshots of a training: what one holds, how it is taken and restored, and the process that keeps it when training dies.

Not here: what a Trainer or a loop puts into one (``integrations``), and tiers and their budgets (``storage``).
"""
