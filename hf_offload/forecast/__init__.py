"""The same for a model or a machine that is not there: footprints counted on tensors without data, and what-ifs.

Nothing here allocates a model, touches a drive, or is imported while training.
"""
