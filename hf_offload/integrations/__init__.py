"""The ways in: the Trainer's arguments and callback, the Accelerate plugin, launched scripts, checkpoints and cards.

This folder only adapts to these libraries; the work is done in :mod:`hf_offload.session`.
"""
