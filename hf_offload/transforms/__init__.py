"""Changes to a model that make it save less for backward, applied before planning and removed at the end.

Saved tensors are moved in ``engine``, and planned for in ``plan``.
"""
