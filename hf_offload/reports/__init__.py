"""What people read: tables and pictures.

Results are measured elsewhere (``training``, ``bench``, ``forecast``), and nothing here is imported while training.
"""
