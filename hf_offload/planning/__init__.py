"""Planning while training: measuring the machine and the step, agreeing between processes, correcting the plan.

What a plan is worth is decided in ``plan``.
"""
