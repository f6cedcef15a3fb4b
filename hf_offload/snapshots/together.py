"""One step for all ranks: each copies by itself, and what one of them has not copied is dropped by all.

Note: commits
    Two ranks may be killed between the commits of the first and of the last one. So the snapshot before stays until it is
    known of all that they have committed this one, and all of them go on from the newest that all have.
"""

from collections.abc import Callable
from typing import Any

from hf_offload.errors import SnapshotError
from hf_offload.ranks import Ranks
from hf_offload.snapshots import parity
from hf_offload.snapshots.memory import MemoryFile, Write
from hf_offload.snapshots.slots import Slots
from hf_offload.storage.kept import Kept


class Together:
    """What the ranks of a training do together, so that each of them has the snapshot of a step, or none.

    Args:
        slots: Those of this rank.
        ranks: All of them.
        with_parity: Whether each keeps a part of the others' snapshots.

    Attributes:
        torn: What has changed while it was copied, in this rank or another one, since it was last asked.
    """

    def __init__(self, slots: Slots, ranks: Ranks, with_parity: bool):
        self.torn: str | None = None
        self._slots = slots
        self._ranks = ranks
        self._with_parity = with_parity

    def snapshot(
        self,
        record: dict[str, Any],
        files: dict[str, Write],
        nbytes: int,
        kept: Kept | None,
        torn: Callable[[], str | None],
    ) -> None:
        """Copy, and commit what all ranks have copied; not if something is ``torn`` in one of them. An error of one of them
        is one of all.
        """
        step, failure = record["step"], None
        slot, written = 0, list[MemoryFile]()
        try:
            more_bytes = nbytes // (self._ranks.count - 1) if self._with_parity else 0
            slot, written = self._slots.again(lambda: self._slots.write(files, nbytes, more_bytes, kept))
        except Exception as error:
            failure = error
        listed = [[name, file.nbytes, file.checksum] for name, file in zip(files, written, strict=failure is None)]
        record = {**record, "files": listed}
        if self._is_dropped(step, torn(), failure):
            return
        if self._with_parity:
            failure = None
            try:
                record, written = self._with_row(slot, record, written)
            except OSError as error:
                failure = self._slots.no_room(nbytes, error)
            if self._is_dropped(step, None, failure):
                return
        failure = None
        try:
            self._slots.again(lambda: self._slots.commit(slot, record, written))
        except OSError as error:
            failure = error
        if not self._is_dropped(step, None, failure):
            self._slots.newest = record["sequence"]

    def _is_dropped(self, step: int, torn: str | None, failure: Exception | None) -> bool:
        """False if all have come as far with the same step. Raises what has failed in a rank."""
        told = self._tell((step, torn, None if failure is None else str(failure)))
        if any(step != other for other, _, _ in told):
            raise RuntimeError(
                f"Ranks take snapshots of different steps, {', '.join(str(each) for each, _, _ in told)}: all of them "
                "have to end the same steps."
            )
        if failure is not None:
            raise failure
        for rank, (_, other_torn, other_failure) in enumerate(told):
            who = "" if rank == self._ranks.number else f"Rank {rank}: "
            if other_failure is not None:
                raise SnapshotError(f"{who}{other_failure}")
            if other_torn is not None:
                self.torn = f"{who}{other_torn}"
                return True
        return False

    def _tell(self, value: Any) -> list[Any]:
        try:
            return self._ranks.gather(value)
        except RuntimeError as error:
            raise SnapshotError(f"Another process of the training does not answer: {error}.") from error

    def _with_row(
        self, slot: int, record: dict[str, Any], written: list[MemoryFile]
    ) -> tuple[dict[str, Any], list[MemoryFile]]:
        """With what this rank keeps of the others, behind its own files."""
        stream = parity.Stream(record, [file.number for file in written])
        sizes = self._tell(stream.nbytes)
        file = self._slots.another_file(slot, len(written))
        file.begin()
        found = parity.take(self._ranks, stream, sizes, file)
        file.end()
        return {**record, parity.NAME: found}, [*written, file]
