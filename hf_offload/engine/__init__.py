"""Activations, as autograd saves them: which are offloaded, where to, when they return, and when they are freed.

No decision about budgets (``plan``), no files or pinned memory of its own (``storage``), and no Trainer.
"""
