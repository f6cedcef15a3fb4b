"""Taking snapshots: files in memory, written while training goes on and whole before the weights change.

Note: consistency
    A snapshot is begun at the end of a step. What is small is copied at once. Weights and optimizer state are copied by a
    thread, during the forward and the backward that follow; :meth:`Snapshots.settle` waits for it and comes before the next
    step of the optimizer. What changes in between would be torn, so the version counter of each tensor is compared at the
    end: then the snapshot is dropped, the one before stays, and from then on snapshots are copied at once.
    The thread takes the checksum of what it writes as it writes it. The record, with names, sizes and checksums, is the last
    that the snapshot process receives: a snapshot without one does not exist.

Note: one step for all ranks
    Ranks copy by themselves, and then say whether they have: what one of them has not is dropped by all. Two may still be
    killed between the commits of the first and of the last one. So the snapshot before stays until it is known of all that
    they have committed this one, and all of them go on from the newest that all have.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hf_offload.errors import SnapshotError, TierFullError
from hf_offload.ranks import Ranks
from hf_offload.settings.sizes import format_bytes
from hf_offload.snapshots import parity, process
from hf_offload.snapshots.client import SnapshotClient
from hf_offload.snapshots.memory import MemoryFile, Writable
from hf_offload.snapshots.restoring import Found
from hf_offload.storage.host_memory import ram_bytes
from hf_offload.storage.service import HeldRam

logger = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 20
"""For all that is small, and what archives add."""


Write = Callable[[Writable], object]
T = TypeVar("T")


class Snapshots:
    """The snapshots that one training takes.

    Attributes:
        taken: How many are whole.
        stalled_s: Seconds that training has waited for them.
    """

    def __init__(
        self,
        address: bytes,
        client: SnapshotClient,
        held: HeldRam,
        ranks: Ranks,
        *,
        sequence: int = 0,
        with_parity: bool = False,
    ):
        self.taken = 0
        self.stalled_s = 0.0
        self._address = address
        self._client: SnapshotClient | None = client
        self._held = held
        self._ranks = ranks
        self._with_parity = with_parity
        self._sequence = sequence
        self._kept: int | None = None  # the number of the newest snapshot that all ranks have
        self._start: dict[str, Any] = {}
        self._files: dict[int, list[MemoryFile]] = {}
        self._whole: dict[int, dict[str, Any]] = {}  # by slot: what another snapshot process would have to be given
        self._adopted: dict[int, list[int]] = {}  # files of an earlier training, which may be mapped into memory
        self._thread: threading.Thread | None = None
        self._began: float | None = None  # to wait
        self._failure: BaseException | None = None
        self._torn: str | None = None
        self._at_once = False
        self._disk_error: str | None = None
        self._was_on_disk = False

    def start(
        self, run: str, began: float, directory: Path | None, wait_s: float, resumed: Found | None = None
    ) -> None:
        """Begin a run. ``directory``, where snapshots go from memory: to that of the first rank; ``wait_s``, how long the
        snapshot process waits for the next training after one that did not end well. What this one has ``resumed`` from is
        held until its slot is used again: the snapshot process may end before.

        Raises :class:`~hf_offload.errors.SnapshotError` if nothing can be written to ``directory``.
        """
        if resumed is not None and resumed.slot is not None and not resumed.is_rebuilt:
            self._adopt(resumed.slot, resumed)
        self._ranks.each(lambda: self._begin_run(run, began, directory if self._ranks.is_first else None, wait_s))
        if resumed is not None and resumed.is_rebuilt:  # the snapshot process has not seen it yet
            self._again(lambda: self._hand_over(resumed))

    def _begin_run(self, run: str, began: float, folder: Path | None, wait_s: float) -> None:
        directory = None if folder is None else str(folder)
        slots = 2 if directory is None else 3  # as snapshots_held() has it
        self._start = {"run": run, "began": began, "directory": directory, "wait_s": wait_s, "slots": slots}
        try:
            error = self._started().ask("start", **self._start)["error"]
        except ConnectionError:
            error = self._reconnect()
        if error is not None:
            raise SnapshotError(
                f"Snapshots cannot be written to {directory}: {error}. Name another snapshot_dir, or none."
            )

    def _hand_over(self, rebuilt: Found) -> None:
        slot = self._started().ask("begin", keep=None)["slot"] if rebuilt.slot is None else rebuilt.slot
        self._started().ask("commit", rebuilt.files, slot=slot, record=rebuilt.record)
        self._adopt(slot, rebuilt)

    def _adopt(self, slot: int, resumed: Found) -> None:
        self._adopted[slot] = [os.dup(number) for number in resumed.files]
        self._whole[slot] = resumed.record
        self._kept = resumed.record["sequence"]

    def take(
        self,
        step: int,
        files: Mapping[str, Write],
        watched: Iterable[Tensor],
        description: Mapping[str, Any],
        nbytes: int,
        *,
        at_once: bool = False,
    ) -> None:
        """Begin a snapshot of ``step``.

        Args:
            step: Optimizer steps so far.
            files: Name -> what writes its content.
            watched: The tensors whose bytes are written, which must stay as they are until :meth:`settle`.
            description: Goes into the record.
            nbytes: Of all files, roughly.
            at_once: Whether to write it now.

        Raises :class:`~hf_offload.errors.SnapshotError` or :class:`~hf_offload.errors.TierFullError` if there is no room for
        the first one. A later one that fails is a warning: the one before stays.
        """
        self.settle()
        versions = [(tensor, tensor._version) for tensor in watched]
        self._sequence += 1
        record = {
            "format": process.FORMAT,
            "run": self._start["run"],
            "began": self._start["began"],
            "sequence": self._sequence,
            "step": step,
            "ranks": self._ranks.count,
            **description,
        }
        self._thread = threading.Thread(
            target=self._copy, args=(record, dict(files), versions, nbytes), name="hf_offload-snapshot", daemon=True
        )
        self._thread.start()
        if at_once or self._at_once:
            self.settle()

    def settle(self) -> None:
        """Wait until the snapshot that was begun is whole: the weights may change then.

        Raises as :meth:`take` does.
        """
        thread = self._thread
        if thread is None:
            return
        with self.waited():
            thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        torn, self._torn = self._torn, None
        if torn is not None:
            self._at_once = True
            logger.warning(
                "%s changed while a snapshot was copied, which is dropped: the next ones are copied at once.", torn
            )
        elif failure is not None:
            if self.taken == 0 or not isinstance(failure, (OSError, SnapshotError, TierFullError)):
                raise failure
            logger.warning("A snapshot was not taken: %s The one before stays.", failure)
        else:
            self.taken += 1
            self._say_disk_error()

    @contextlib.contextmanager
    def waited(self) -> Iterator[None]:
        """Training waits for what is done inside, such as a snapshot that is gathered."""
        began, self._began = self._began, self._began or time.perf_counter()
        try:
            yield
        finally:
            if began is None:
                self.stalled_s += time.perf_counter() - self._began
            self._began = began

    def look(self) -> None:
        """Have another snapshot process keep what there is, should this one have ended. Costs a system call."""
        if self._thread is None and self._client is not None and self._client.is_gone:
            self._reconnect()

    def leave(self) -> None:
        """Training has not ended well: the snapshots stay for the next one. Idempotent."""
        self._close(SnapshotClient.close)

    def end(self) -> None:
        """Training has ended well: the snapshots go. Idempotent."""
        self._close(SnapshotClient.end)

    def _close(self, how: Callable[[SnapshotClient], None]) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = self._failure = None
        client, self._client = self._client, None
        if client is not None:
            how(client)
        for files in self._files.values():
            for file in files:
                file.close()
        for slot in list(self._adopted):
            self._drop_adopted(slot)
        self._files.clear()
        self._whole.clear()
        self._held.release(list(self._held.held))

    # -- in the thread ------------------------------------------------------------------------------------------------------

    def _copy(
        self, record: dict[str, Any], files: dict[str, Write], versions: Sequence[tuple[Tensor, int]], nbytes: int
    ) -> None:
        try:
            self._copy_in_step(record, files, versions, nbytes)
        except BaseException as error:
            self._failure = error

    def _copy_in_step(
        self, record: dict[str, Any], files: dict[str, Write], versions: Sequence[tuple[Tensor, int]], nbytes: int
    ) -> None:
        """Copy, and commit what all ranks have copied. An error of one of them is one of all."""
        slot, written, failure = 0, list[MemoryFile](), None
        try:
            slot, written = self._again(lambda: self._copy_to_slot(files, nbytes))
        except Exception as error:
            failure = error
        changed = next((tensor for tensor, version in versions if tensor._version != version), None)
        torn = None if changed is None else f"A tensor of shape {tuple(changed.shape)}"
        listed = [[name, file.nbytes, file.checksum] for name, file in zip(files, written, strict=failure is None)]
        record = {**record, "files": listed}
        if self._agree(record["step"], torn, failure):
            return
        if self._with_parity:
            failure = None
            try:
                record, written = self._parity_of(slot, record, written)
            except OSError as error:
                failure = self._no_room(nbytes, error)
            if self._agree(record["step"], None, failure):
                return
        failure = None
        try:
            self._again(lambda: self._commit(slot, record, written))
        except OSError as error:
            failure = error
        # Until all have said that they have, the one before keeps its place.
        if not self._agree(record["step"], None, failure):
            self._kept = record["sequence"]

    def _agree(self, step: int, torn: str | None, failure: Exception | None) -> bool:
        """Whether a rank has failed, which is noted then; or all have copied the same step."""
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
                self._torn = f"{who}{other_torn}"
                return True
        return False

    def _tell(self, value: Any) -> list[Any]:
        try:
            return self._ranks.gather(value)
        except RuntimeError as error:
            raise SnapshotError(f"Another process of the training does not answer: {error}.") from error

    def _again(self, work: Callable[[], T]) -> T:
        """Once more, with another snapshot process, if this one has ended."""
        try:
            return work()
        except ConnectionError:
            self._reconnect()
            return work()

    def _copy_to_slot(self, files: dict[str, Write], nbytes: int) -> tuple[int, list[MemoryFile]]:
        answer = self._started().ask("begin", keep=self._kept)
        slot, self._disk_error = answer["slot"], answer["error"]
        self._whole.pop(slot, None)
        self._drop_adopted(slot)
        present = self._files.setdefault(slot, [])
        parity_bytes = nbytes // (self._ranks.count - 1) if self._with_parity else 0
        self._make_room(slot, nbytes + parity_bytes + _SPARE_BYTES, sum(file.nbytes for file in present))
        try:
            present += [MemoryFile() for _ in range(len(files) - len(present))]
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
            raise self._no_room(nbytes, error) from error
        return slot, present[: len(files)]

    def _parity_of(
        self, slot: int, record: dict[str, Any], written: list[MemoryFile]
    ) -> tuple[dict[str, Any], list[MemoryFile]]:
        """What is kept of the others, behind the files of this rank."""
        stream = parity.Stream(record, [file.number for file in written])
        sizes = self._tell(stream.nbytes)
        present = self._files[slot]
        if len(present) == len(written):
            present.append(MemoryFile())
        file = present[len(written)]
        file.begin()
        found = parity.take(self._ranks, stream, sizes, file)
        file.end()
        return {**record, parity.NAME: found}, [*written, file]

    def _commit(self, slot: int, record: dict[str, Any], written: list[MemoryFile]) -> None:
        self._started().ask("commit", [file.number for file in written], slot=slot, record=record)
        self._whole[slot] = record

    def _no_room(self, nbytes: int, error: OSError) -> SnapshotError:
        return SnapshotError(
            f"There is no room in shared memory for a snapshot of {format_bytes(nbytes)}: {error}. Snapshots take "
            f"{self._start['slots']} times that: free memory, raise its limit, or drop snapshot_steps."
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
                    f"A snapshot needs {format_bytes(nbytes)}, and memory holds {self._start['slots']}. {error} Raise "
                    "ram_budget, or drop snapshot_steps."
                ) from error
        available = ram_bytes()[1]
        if available is not None and (nbytes - present) * self._ranks.local_count > available:
            raise SnapshotError(
                f"There is no room in shared memory for a snapshot of {format_bytes(nbytes)}: {format_bytes(available)} are "
                f"available. Snapshots take {self._start['slots']} times that: free memory, or drop snapshot_steps."
            )

    # -- the snapshot process -----------------------------------------------------------------------------------------------

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
        client = SnapshotClient.connect(self._address, start=True)
        assert client is not None
        refused = client.ask("join").get("refused")
        if refused is not None:
            client.close()
            raise SnapshotError(
                f"Process {refused} has taken over the snapshots of this training: two must not run at a time."
            )
        self._client = client
        error: str | None = client.ask("start", **self._start)["error"]
        for slot, record in sorted(self._whole.items(), key=lambda item: item[1]["sequence"]):
            count = len(record["files"]) + len(record.get(parity.NAME, {}).get("files", ()))
            numbers = self._adopted.get(slot) or [file.number for file in self._files[slot][:count]]
            client.ask("commit", numbers, slot=slot, record=record)
        return error

    def _say_disk_error(self) -> None:
        error = self._disk_error
        if error is None:
            return
        self._disk_error = None
        logger.warning(
            "A snapshot was not written to %s: %s. Those in memory are whole: free space there.",
            self._start["directory"],
            error,
        )
