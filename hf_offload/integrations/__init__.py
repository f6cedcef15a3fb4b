"""The ways in: the Trainer's arguments and callback, the Accelerate plugin, launched scripts, checkpoints and cards.

Only what these libraries ask for is here; what is done for them is :mod:`hf_offload.session`'s.
"""
