"""Where bytes live: tiers behind one contract (:mod:`hf_offload.storage.tier`)."""
