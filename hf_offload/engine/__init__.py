"""Activations, as autograd saves them: which are taken, where they go, when they are back, and who may let go of them.

No decision about budgets (``plan``), no files or pinned memory of its own (``storage``), and no Trainer.
"""
