"""What was asked for: every setting, declared once, in all the ways it can be given, and recipes.

Nothing here acts on a setting, and nothing loads torch.
"""
