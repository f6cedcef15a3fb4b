"""Where bytes live: tiers of pinned memory and of files behind one contract (:mod:`hf_offload.storage.tier`).

Nothing here knows tensors of a graph, models or steps.
"""
