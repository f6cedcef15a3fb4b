"""Changes of a model that make it save less for backward, applied before a plan is made and taken off again.

What moves saved tensors is not here (``engine``), nor what decides about them (``plan``).
"""
