"""What people read: model cards, tables, plots, and the self-test of a device.

Results are measured elsewhere (``training``, ``bench``, ``forecast``), and nothing here is imported while training.
"""
