"""What is trained, and what its optimizer holds: a file for each memory mode, all of them
:class:`~hf_offload.memory_modes.protocol.MemoryMode`; their names are in ``settings/memory_modes.py``.
Nothing here knows the Trainer, plans or activations.
"""
