"""Memory modes: what is trained, and with which optimizer; a folder for each method, with its optimizer in it. All are
:class:`~hf_offload.methods.protocol.MemoryMode`; their names are in ``settings/memory_modes.py``.

Nothing here knows the Trainer, plans or activations.
"""
