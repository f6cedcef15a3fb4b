"""Where the snapshots of one rank are: files in memory, whose descriptors the snapshot process has, too."""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hf_offload.errors import SnapshotError, TierFullError
from hf_offload.settings.sizes import format_bytes
from hf_offload.snapshots import retained
from hf_offload.snapshots.client import SnapshotClient
from hf_offload.snapshots.memory import MemoryFile, Write
from hf_offload.snapshots.process import MOST_FILES
from hf_offload.snapshots.restoring import Found, Opened
from hf_offload.storage.host_memory import ram_bytes
from hf_offload.storage.service import HeldRam

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SPARE_BYTES = 1 << 20
"""For small things, and what archives add."""


class Slots:
    """The files of the snapshots that are whole, and those that the next one is written to. Should the snapshot process end,
    another one gets them.

    Args:
        opened: Has the connection to the process.
        held: Where the memory counts.
        count: How many snapshots are in memory at a time.
        local_count: Processes of the training on this machine, each of which takes snapshots.

    Attributes:
        newest: The sequence of the newest snapshot that all ranks have, whose files are not written to.
        disk_error: Why the last snapshot was not written to disk, if it was not.
    """

    def __init__(self, opened: Opened, held: HeldRam, count: int, local_count: int):
        self.newest: int | None = None
        self.disk_error: str | None = None
        self._address = opened.address
        self._client: SnapshotClient | None = opened.client
        self._held = held
        self._count = count
        self._local_count = local_count
        self._run: dict[str, Any] = {}
        self._whole: dict[int, tuple[dict[str, Any], list[int]]] = {}  # record and descriptors, by sequence
        self._files: dict[int, list[MemoryFile]] = {}
        self._free: list[list[MemoryFile]] = []  # of snapshots that were dropped

    def begin_run(self, run: dict[str, Any], found: Found | None) -> None:
        """Tell the process of a run, which goes on from what was ``found``. Its files are kept until there is a newer one:
        the process may end before.

        Raises :class:`~hf_offload.errors.SnapshotError` if nothing can be written to its ``directory``.
        """
        self._run = run
        if found is not None and found.numbers:
            sequence = self.newest = int(found.record["sequence"])
            self._whole[sequence] = found.record, [os.dup(number) for number in found.numbers]
        error = self.again(lambda: self._connected.ask("start", **run))["error"]
        if error is not None:
            raise SnapshotError(
                f"Snapshots cannot be written to {run['directory']}: {error}. Name another snapshot_dir, or none."
            )
        if found is not None and found.is_rebuilt:
            self.again(lambda: self.commit(*self._whole[found.record["sequence"]]))

    def write(self, sequence: int, files: Mapping[str, Write], nbytes: int, more_bytes: int) -> list[MemoryFile]:
        """Write a snapshot of about ``nbytes``, to which a file of ``more_bytes`` will be added."""
        answer = self._connected.ask("begin", keep=self.newest)
        self.disk_error = answer["error"]
        self._drop_all_but(answer["held"])
        present = self._files[sequence] = self._free.pop() if self._free else []
        self._make_room(nbytes + more_bytes + _SPARE_BYTES, sum(file.nbytes for file in present))
        try:
            count = len(files) + (more_bytes > 0)
            present += [MemoryFile(nbytes) for _ in range(count - len(present))]
            for file, write in zip(present, files.values(), strict=False):
                file.begin()
                write(file)
                file.end()
        except OSError as error:
            for file in present:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.number, 0)
            raise self.no_room(nbytes, error) from error
        return present[: len(files)]

    def parity_file(self, sequence: int, number: int) -> MemoryFile:
        """The one that comes after the ``number`` files of a snapshot."""
        file = self._files[sequence][number]
        file.begin()
        return file

    def commit(self, record: dict[str, Any], numbers: list[int]) -> None:
        """The snapshot is whole: have the process keep it."""
        if len(numbers) > MOST_FILES:
            raise SnapshotError(
                f"A snapshot of {len(numbers)} files takes more descriptors than can be passed on ({MOST_FILES}): drop "
                "snapshot_steps, and save checkpoints."
            )
        self._connected.ask("commit", numbers, record=record)
        self._whole[record["sequence"]] = record, numbers

    def no_room(self, nbytes: int, why: object) -> SnapshotError:
        """What is raised where memory has no room."""
        return SnapshotError(
            f"There is no room in shared memory for a snapshot of {format_bytes(nbytes)}: {why}. Snapshots take "
            f"{self._count} times that: free memory, raise its limit, or drop snapshot_steps."
        )

    def _drop_all_but(self, held: list[int]) -> None:
        """What the process does not hold any more is written to next."""
        for sequence in (self._whole.keys() | self._files.keys()).difference(held):
            _, numbers = self._whole.pop(sequence, ({}, []))
            if sequence in self._files:
                self._free.append(self._files.pop(sequence))
            else:  # of an earlier start: they may be mapped
                for number in numbers:
                    os.close(number)

    def _make_room(self, nbytes: int, present: int) -> None:
        """Take the bytes from the budget, and see that the machine has them."""
        name = f"snapshot {len(self._files) + len(self._free)}"
        if nbytes > self._held.held.get(name, 0):
            try:
                self._held.release([name])
                self._held.hold({name: nbytes})
            except TierFullError as error:
                raise TierFullError(
                    f"A snapshot needs {format_bytes(nbytes)}, and memory holds {self._count}. {error} Raise ram_budget, or "
                    "drop snapshot_steps."
                ) from error
        available = ram_bytes()[1]
        if available is not None and (nbytes - present) * self._local_count > available:
            raise self.no_room(nbytes, f"{format_bytes(available)} are available")

    # -- the end ------------------------------------------------------------------------------------------------------------

    def over(self, before: int | None) -> None:
        """Have the process keep the newest snapshot alone; with ``before``, the newest of an earlier step."""
        whole = [
            sequence
            for sequence, (record, _) in self._whole.items()
            if sequence <= (self.newest or 0) and (before is None or record["step"] < before)
        ]
        if whole:
            self.again(lambda: self._connected.ask("over", keep=max(whole)))
            retained.retain(self._address, self._connected)
        elif self._client is not None:
            self._client.end()
        self._close()

    def leave(self) -> None:
        """Part from the process, which keeps what there is. Idempotent."""
        if self._client is not None:
            self._client.close()
        self._close()

    def _close(self) -> None:
        self._client = None
        self._drop_all_but([])
        for files in self._free:
            for file in files:
                file.close()
        self._free = []
        self._held.release(list(self._held.held))

    # -- the snapshot process -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Have another snapshot process keep what there is, should this one have ended. Costs a system call."""
        if self._client is not None and self._client.is_gone:
            self._reconnect()

    def again(self, work: Callable[[], T]) -> T:
        """What ``work`` returns. It is done once more, with another snapshot process, if this one has ended."""
        try:
            return work()
        except ConnectionError:
            self._reconnect()
            return work()

    @property
    def _connected(self) -> SnapshotClient:
        if self._client is None:
            raise ConnectionError("there is no snapshot process")
        return self._client

    def _reconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        logger.warning("The snapshot process has ended, by a signal or for lack of memory: another one is started.")
        client = SnapshotClient.connect(self._address, start=True)
        assert client is not None
        refused = client.ask("join").get("refused")
        if refused is not None:
            client.close()
            raise SnapshotError(
                f"Process {refused} has taken over the snapshots of this training: two must not run at a time."
            )
        self._client = client
        client.ask("start", **self._run)
        for record, numbers in [self._whole[sequence] for sequence in sorted(self._whole)]:
            client.ask("commit", numbers, record=record)
