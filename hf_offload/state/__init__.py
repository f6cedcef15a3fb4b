"""Weights, gradients and optimizer state that leave memory, and come back before they are used.

A storage is here, leaving or away (:mod:`parked`): its pointer is swapped, and the tensors over it stay the same objects. On
a CPU, an away storage is its slot, mapped. A tensor that must not be read as it is has a guard, which settles that first
(:mod:`guard`). What a block owns comes and goes together (:mod:`units`): its weights before its forward, with the updates
that they owe (:mod:`step`).

Not here: saved activations (``engine``), the choice of what moves (``planning``), and anything of Trainers or Accelerate. Of
plans, only the sizes of windows are known. Nothing of PyTorch is replaced, and bytes move only by :class:`Store`.
"""
