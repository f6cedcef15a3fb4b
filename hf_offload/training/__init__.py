"""Running a recipe: its model, data and tasks, the Trainer, and the record of losses, times and memory it leaves.

Offloading itself is reached as users reach it, through ``integrations``.
"""
