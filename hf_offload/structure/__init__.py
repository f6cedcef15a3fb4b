"""What a model is made of: blocks, units, linear layers, and what a block's forward takes and changes besides tensors.

No policy (nothing here knows budgets, tiers or plans) and nothing that changes a model.
"""
