"""Bytes on a drive that stay there as they are, whatever becomes of their slot: a copy that a state dict has is mapped there.

Note: redirect on write
    What is written after its slot was held (:class:`KeptSlot`) gets another slot. So a state as of a step needs no copy, and
    its room is free once it is not needed any more.
"""

import weakref
from collections.abc import Sequence

from hf_offload.storage.disk_room import DiskRoom, Piece


class KeptSlot:
    """The bytes of one slot of the disk tier as they are now, for as long as this object is there.

    Args:
        room: Where it is.
        pieces: Its room, held already.
    """

    def __init__(self, room: DiskRoom, pieces: Sequence[Piece]):
        weakref.finalize(self, room.let_go.append, tuple(pieces)).atexit = False
