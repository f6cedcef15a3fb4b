"""A step's saved bytes and segments as arrays, for arithmetic on all of them at once."""

import dataclasses

import numpy as np

Column = np.ndarray[tuple[int], np.dtype[np.int64]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclasses.dataclass(frozen=True, slots=True)
class SavedColumns:
    """:class:`Saved` of a whole step, an array for each field. A unit is its place among the footprint's."""

    unit: Column
    nbytes: Column
    packed: Column
    gone: Column
    needed: Column
    released: Column

    def where(self, mask: Mask) -> "SavedColumns":
        """The rows for which ``mask`` holds."""
        return SavedColumns(*(getattr(self, field)[mask] for field in self.__slots__))

    def and_then(self, others: "SavedColumns") -> "SavedColumns":
        """These rows, and ``others`` after them."""
        return SavedColumns(
            *(np.concatenate([getattr(one, field) for one in (self, others)]) for field in self.__slots__)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentColumns:
    """Of all segments: when each begins, in seconds of compute alone, and the end of the last; and its bytes."""

    begins_s: list[float]
    live_bytes: Column
    measured_bytes: Column
