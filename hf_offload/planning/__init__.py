"""Planning while training: measuring the machine and the step, agreeing between processes, correcting the plan.

What a plan is worth is decided in ``plan``; the engine is reached through the protocols in ``measuring`` and ``observed``.
"""
