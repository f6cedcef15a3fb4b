"""What makes the tables of ``docs/measured*.md``: run as ``python -m benchmarks NAME``, in a checkout.

Nothing of the package imports this, and it is not part of the wheel: ``hf-offload bench`` has what users measure.
"""
