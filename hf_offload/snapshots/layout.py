"""Which ranges of a snapshot's files are kept on drives, and where."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_offload.snapshots import disk
from hf_offload.snapshots.memory import MemoryFile, Ranges, damage_of
from hf_offload.storage.disk_io import open_nameless

Layout = dict[int, list[Any]]
"""Number of a file -> its ranges, as :func:`~hf_offload.snapshots.disk.layout_in` has them."""


class KeptOnDrives:
    """What a snapshot has on drives: a file that lists it, and descriptors of the drives' files."""

    def __init__(self) -> None:
        self.sources: list[int] = []
        self._list = MemoryFile()

    def note(self, written: Sequence[MemoryFile]) -> dict[str, Any] | None:
        """List what these files have left out. Returns what the record says of it, or None if that is nothing."""
        self.forget()
        places: dict[Any, int] = {}
        listed = []
        for number, file in enumerate(written):
            for begin, count, spans in file.ranges:
                for span in spans:
                    if span.file is not None and span.file not in places:
                        places[span.file] = len(places)
                        self.sources.append(os.dup(span.file.descriptor))
                where = [[-1 if span.file is None else places[span.file], span.offset, span.nbytes] for span in spans]
                listed.append([number, begin, count, where])
        if not listed:
            return None
        self._list.begin()
        self._list.write(json.dumps(listed).encode())
        self._list.end()
        return {
            "list": [self._list.nbytes, self._list.checksum],
            "sources": len(places),
            "directory": str(next(iter(places)).directory.resolve()) if places else None,
        }

    @property
    def numbers(self) -> list[int]:
        """The descriptors, in the order in which they follow those of the snapshot's files."""
        return [self._list.number, *self.sources]

    def forget(self) -> None:
        """Close the drives' files."""
        for number in self.sources:
            os.close(number)
        self.sources = []

    def close(self) -> None:
        self.forget()
        self._list.close()


def ranges_of(layout: Layout, number: int) -> Ranges:
    """First byte and length of each range of a file."""
    return [(begin, count) for begin, count, _ in layout.get(number, ())]


def layout_of(record: Mapping[str, Any], numbers: Sequence[int]) -> tuple[Layout, str | None]:
    """That of a snapshot in memory with these descriptors, and what is wrong with it."""
    if disk.KEPT not in record:
        return {}, None
    damage = damage_of(numbers[len(record["files"])], *record[disk.KEPT]["list"])
    return ({}, f"the list of what is on drives {damage}") if damage else (disk.layout_in(record, numbers), None)


def assembled(record: Mapping[str, Any], numbers: Sequence[int], layout: Layout, number: int) -> int:
    """A file without a name, on the drive, that has all bytes of one that lacks ranges. Raises ``OSError``."""
    whole = open_nameless(Path(record[disk.KEPT]["directory"]))
    try:
        sources = numbers[len(record["files"]) + 1 :]
        disk.copy_whole(whole, numbers[number], record["files"][number][1], layout[number], sources)
    except BaseException:
        os.close(whole)
        raise
    return whole
