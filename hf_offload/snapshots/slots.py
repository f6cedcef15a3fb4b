"""Where the snapshots of one rank are: files in memory, slot by slot, whose descriptors the snapshot process has, too."""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hf_offload.errors import SnapshotError, TierFullError
from hf_offload.settings.sizes import format_bytes
from hf_offload.snapshots import disk
from hf_offload.snapshots.client import SnapshotClient
from hf_offload.snapshots.layout import KeptOnDrives
from hf_offload.snapshots.memory import MemoryFile, Write
from hf_offload.snapshots.process import MOST_FILES
from hf_offload.snapshots.restoring import Found
from hf_offload.storage.host_memory import ram_bytes
from hf_offload.storage.kept import Kept
from hf_offload.storage.service import HeldRam

logger = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 20
"""For all that is small, and what archives add."""

T = TypeVar("T")


class Slots:
    """The slots of one training, and its snapshot process, of which there is another one should it end.

    Args:
        address: Becomes the attribute.
        client: The connection to it.
        held: Where the memory counts.
        local_count: Processes of the training on this machine, each of which takes snapshots.

    Attributes:
        address: Where the process listens.
        start: What the process knows of the run.
        newest: The number of the newest snapshot that all ranks have: its slot is not written to.
        disk_error: Why the last snapshot was not written to disk, if it was not.
    """

    def __init__(self, address: bytes, client: SnapshotClient, held: HeldRam, local_count: int):
        self.start: dict[str, Any] = {}
        self.newest: int | None = None
        self.disk_error: str | None = None
        self.address = address
        self._client: SnapshotClient | None = client
        self._held = held
        self._local_count = local_count
        self._files: dict[int, list[MemoryFile]] = {}
        self._whole: dict[int, dict[str, Any]] = {}  # by slot: what another snapshot process would have to be given
        self._adopted: dict[int, list[int]] = {}  # files of an earlier training, which may be mapped into memory
        self._kept: dict[int, Kept] = {}
        self._on_drives: dict[int, KeptOnDrives] = {}
        self._numbers: dict[int, list[int]] = {}  # of the descriptors of what is whole

    # -- a run --------------------------------------------------------------------------------------------------------------

    def begin_run(self, run: str, began: float, folder: Path | None, wait_s: float) -> None:
        """Tell the process of a run. Raises :class:`~hf_offload.errors.SnapshotError` if nothing can be written to
        ``folder``.
        """
        directory = None if folder is None else str(folder)
        slots = 2 if directory is None else 3  # as snapshots_held() has it
        self.start = {"run": run, "began": began, "directory": directory, "wait_s": wait_s, "slots": slots}
        try:
            error = self._started().ask("start", **self.start)["error"]
        except ConnectionError:
            error = self._reconnect()
        if error is not None:
            raise SnapshotError(
                f"Snapshots cannot be written to {directory}: {error}. Name another snapshot_dir, or none."
            )

    def adopt(self, slot: int, resumed: Found) -> None:
        """Hold what a training has resumed from until its slot is used again: the process may end before."""
        self._adopted[slot] = [os.dup(number) for number in resumed.files]
        self._whole[slot] = resumed.record
        self.newest = resumed.record["sequence"]

    def hand_over(self, rebuilt: Found) -> None:
        """Give the process a snapshot that it has not seen yet."""
        self.again(lambda: self._hand_over(rebuilt))

    def _hand_over(self, rebuilt: Found) -> None:
        slot = self._started().ask("begin", keep=None)["slot"] if rebuilt.slot is None else rebuilt.slot
        self._started().ask("commit", rebuilt.files, slot=slot, record=rebuilt.record)
        self.adopt(slot, rebuilt)

    def over(self, before: int | None) -> tuple[SnapshotClient, Kept | None] | None:
        """Have the process keep the newest snapshot alone; with ``before``, the newest of an earlier step. Returns the
        connection and what the snapshot has on drives, or None if there is none, and the process ends.
        """
        whole = [
            (record["sequence"], slot)
            for slot, record in self._whole.items()
            if record["sequence"] <= (self.newest or 0) and (before is None or record["step"] < before)
        ]
        if not whole:
            self.end()
            return None
        sequence, slot = max(whole)
        self.again(lambda: self._started().ask("over", keep=sequence))
        client, kept = self._started(), self._kept.pop(slot, None)
        for each in self._kept.values():
            each.release()
        self._close(lambda _: None)
        return client, kept

    def end(self) -> None:
        """Have the process end: no snapshot is needed any more. Idempotent."""
        kept = list(self._kept.values())
        self._close(SnapshotClient.end)
        for each in kept:
            each.release()

    def leave(self) -> None:
        """Part from the process, which keeps what there is. Idempotent."""
        for kept in self._kept.values():
            kept.abandon()
        self._close(SnapshotClient.close)

    def _close(self, how: Callable[[SnapshotClient], None]) -> None:
        client, self._client = self._client, None
        if client is not None:
            how(client)
        for files in self._files.values():
            for file in files:
                file.close()
        for slot in list(self._adopted):
            self._drop_adopted(slot)
        for each in self._on_drives.values():
            each.close()
        self._files.clear()
        self._whole.clear()
        self._on_drives.clear()
        self._kept.clear()
        self._held.release(list(self._held.held))

    # -- a snapshot ---------------------------------------------------------------------------------------------------------

    def again(self, work: Callable[[], T]) -> T:
        """What ``work`` returns. It is done once more, with another snapshot process, if this one has ended."""
        try:
            return work()
        except ConnectionError:
            self._reconnect()
            return work()

    def write(
        self, files: Mapping[str, Write], nbytes: int, more_bytes: int, kept: Kept | None
    ) -> tuple[int, list[MemoryFile]]:
        """Write a snapshot to a slot, whose former one is gone then. It has ``nbytes`` besides what is ``kept`` on drives,
        and ``more_bytes`` will follow.
        """
        answer = self._started().ask("begin", keep=self.newest)
        slot, self.disk_error = answer["slot"], answer["error"]
        self._whole.pop(slot, None)
        self._drop_adopted(slot)
        former = self._kept.pop(slot, None)
        if former is not None and former is not kept:
            former.release()
        if kept is not None:
            self._kept = {number: each for number, each in self._kept.items() if each is not kept} | {slot: kept}
        try:
            return slot, self._written(slot, files, nbytes, more_bytes, kept)
        except ConnectionError:
            raise
        except BaseException:
            if kept is not None:
                self._kept.pop(slot).release()  # nothing refers to it
            raise

    def _written(
        self, slot: int, files: Mapping[str, Write], nbytes: int, more_bytes: int, kept: Kept | None
    ) -> list[MemoryFile]:
        if kept is not None:
            self._check_drives(kept)
        present = self._files.setdefault(slot, [])
        self._make_room(slot, nbytes + more_bytes + _SPARE_BYTES, sum(file.nbytes for file in present))
        try:
            present += [MemoryFile(nbytes) for _ in range(len(files) - len(present))]
            for file, write in zip(present, files.values(), strict=False):
                file.begin()
                write(file)
                file.end()
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            for file in present:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.number, 0)
            raise self.no_room(nbytes, error) from error
        return present[: len(files)]

    def another_file(self, slot: int, number: int) -> MemoryFile:
        """One that comes behind the ``number`` files of the snapshot in ``slot``."""
        present = self._files[slot]
        if len(present) == number:
            present.append(MemoryFile())
        return present[number]

    def commit(self, slot: int, record: dict[str, Any], written: list[MemoryFile]) -> None:
        """The snapshot is whole: have the process keep it."""
        numbers = [file.number for file in written]
        if slot in self._kept:
            on_drives = self._on_drives.setdefault(slot, KeptOnDrives())
            noted = on_drives.note(written)
            if noted is not None:
                record, numbers = {**record, disk.KEPT: noted}, [*numbers, *on_drives.numbers]
        if len(numbers) > MOST_FILES:
            raise SnapshotError(
                f"A snapshot of {len(record['files'])} files of weights and optimizers, and drives, takes {len(numbers)} "
                f"descriptors, and {MOST_FILES} can be passed on: drop snapshot_steps, and save checkpoints."
            )
        self._started().ask("commit", numbers, slot=slot, record=record)
        self._whole[slot], self._numbers[slot] = record, numbers

    def no_room(self, nbytes: int, error: OSError) -> SnapshotError:
        """What is raised where memory has no room."""
        return SnapshotError(
            f"There is no room in shared memory for a snapshot of {format_bytes(nbytes)}: {error}. Snapshots take "
            f"{self.start['slots']} times that: free memory, raise its limit, or drop snapshot_steps."
        )

    def _check_drives(self, kept: Kept) -> None:
        """What is kept is written to another place by the next step, which has to be there."""
        if kept.refusal is not None:
            raise SnapshotError(
                f"A snapshot keeps weights on their drive, which has no room for them: {kept.refusal} Or drop snapshot_steps."
            ) from kept.refusal
        for room, nbytes in kept.rooms.items():
            if room.free_bytes < nbytes:
                where = ", ".join(str(file.directory) for file in room.files)
                raise SnapshotError(
                    f"A snapshot keeps {format_bytes(nbytes)} in {where}, and the next step needs as much again, but there "
                    f"are {format_bytes(room.free_bytes)}: raise disk_budget, free space there, or drop snapshot_steps."
                )

    def _make_room(self, slot: int, nbytes: int, present: int) -> None:
        """Take the bytes from the budget, and see that the machine has them."""
        name = f"slot {slot}"
        held = self._held.held.get(name, 0)
        if nbytes > held:
            try:
                self._held.release([name])
                self._held.hold({name: nbytes})
            except TierFullError as error:
                raise TierFullError(
                    f"A snapshot needs {format_bytes(nbytes)}, and memory holds {self.start['slots']}. {error} Raise "
                    "ram_budget, or drop snapshot_steps."
                ) from error
        available = ram_bytes()[1]
        if available is not None and (nbytes - present) * self._local_count > available:
            raise SnapshotError(
                f"There is no room in shared memory for a snapshot of {format_bytes(nbytes)}: {format_bytes(available)} are "
                f"available. Snapshots take {self.start['slots']} times that: free memory, or drop snapshot_steps."
            )

    # -- the snapshot process -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Have another snapshot process keep what there is, should this one have ended. Costs a system call."""
        if self._client is not None and self._client.is_gone:
            self._reconnect()

    def say_disk_error(self) -> None:
        """Warn if the last snapshot was not written to disk."""
        error, self.disk_error = self.disk_error, None
        if error is not None:
            logger.warning(
                "A snapshot was not written to %s: %s. Those in memory are whole.",
                self.start["directory"],
                error,
            )

    def _started(self) -> SnapshotClient:
        if self._client is None:
            raise ConnectionError("there is no snapshot process")
        return self._client

    def _drop_adopted(self, slot: int) -> None:
        for number in self._adopted.pop(slot, ()):
            os.close(number)

    def _reconnect(self) -> str | None:
        """Start another snapshot process, and pass on to it what is whole. Returns what is wrong with the directory."""
        if self._client is not None:
            self._client.close(wait_s=1.0)
            self._client = None
        logger.warning("The snapshot process has ended, by a signal or for lack of memory: another one is started.")
        client = SnapshotClient.connect(self.address, start=True)
        assert client is not None
        refused = client.ask("join").get("refused")
        if refused is not None:
            client.close()
            raise SnapshotError(
                f"Process {refused} has taken over the snapshots of this training: two must not run at a time."
            )
        self._client = client
        error: str | None = client.ask("start", **self.start)["error"]
        for slot, record in sorted(self._whole.items(), key=lambda item: item[1]["sequence"]):
            client.ask("commit", self._adopted.get(slot) or self._numbers[slot], slot=slot, record=record)
        return error
