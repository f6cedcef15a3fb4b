"""Weights, gradients and optimizer state that leave memory, and come back before anyone reads them.

A storage is here, leaving or away (:mod:`parked`); its pointer is swapped, and the tensors over it stay the same objects. On
a CPU, an away storage is its slot, mapped. Where a tensor must not be read as it is, a guard settles that first
(:mod:`guard`). What a block owns comes and goes together (:mod:`units`): weights before the block's forward, with the updates
they still owe (:mod:`step`).

Nothing here knows activations, plans or trainers.
"""
