"""What a model is made of: blocks, units, and linear layers.

No policy (nothing here knows budgets, tiers or plans) and nothing that changes a model.
"""
