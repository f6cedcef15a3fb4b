"""Taking snapshots: files in memory, written while training goes on and whole before the weights change.

Note: consistency
    A snapshot is begun at the end of a step. What is small is copied at once. Weights and optimizer state are copied by a
    thread, during the forward and the backward that follow; :meth:`Snapshots.settle` waits for it and comes before the next
    step of the optimizer. What changes in between would be torn, so the version counter of each tensor is compared at the
    end: then the snapshot is dropped, the one before stays, and from then on snapshots are copied at once.
    The thread takes the checksum of what it writes as it writes it. The record, with names, sizes and checksums, is the last
    that the snapshot process receives: a snapshot without one does not exist.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_offload.errors import SnapshotError, TierFullError
from hf_offload.ranks import Ranks
from hf_offload.snapshots import disk, ended
from hf_offload.snapshots.client import SnapshotClient
from hf_offload.snapshots.memory import Write, together
from hf_offload.snapshots.restoring import Found
from hf_offload.snapshots.slots import Slots
from hf_offload.snapshots.together import Together
from hf_offload.storage.kept import Kept
from hf_offload.storage.service import HeldRam

logger = logging.getLogger(__name__)


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
        self._slots = Slots(address, client, held, ranks.local_count)
        self._together = Together(self._slots, ranks, with_parity)
        self._ranks = ranks
        self._with_parity = with_parity
        self._sequence = sequence
        self._thread: threading.Thread | None = None
        self._began: float | None = None  # to wait
        self._failure: BaseException | None = None
        self._at_once = False

    def start(
        self, run: str, began: float, directory: Path | None, wait_s: float, resumed: Found | None = None
    ) -> None:
        """Begin a run. ``directory``, where snapshots go from memory: to that of the first rank; ``wait_s``, how long the
        snapshot process waits for the next training after one that did not end well. What this one has ``resumed`` from is
        held until its slot is used again: the snapshot process may end before.

        Raises :class:`~hf_offload.errors.SnapshotError` if nothing can be written to ``directory``.
        """
        if resumed is not None and resumed.slot is not None and not resumed.is_rebuilt:
            self._slots.adopt(resumed.slot, resumed)
        folder = directory if self._ranks.is_first else None
        self._ranks.each(lambda: self._slots.begin_run(run, began, folder, wait_s))
        if resumed is not None and resumed.is_rebuilt:
            self._slots.hand_over(resumed)

    def take(
        self,
        step: int,
        files: Mapping[str, Write],
        watched: Iterable[Tensor],
        description: Mapping[str, Any],
        *,
        kept: Kept | None = None,
        at_once: bool = False,
    ) -> None:
        """Begin a snapshot of ``step``.

        Args:
            step: Optimizer steps so far.
            files: Name -> what writes its content.
            watched: The tensors whose bytes are written, which must stay as they are until :meth:`settle`.
            description: Goes into the record.
            kept: What is not written, for it is on drives.
            at_once: Whether to write it now.

        Raises :class:`~hf_offload.errors.SnapshotError` or :class:`~hf_offload.errors.TierFullError` if there is no room for
        the first one. A later one that fails is a warning: the one before stays.
        """
        self.settle()
        written = [tensor for tensor in watched if kept is None or not kept.has(tensor)]
        nbytes = sum(tensor.nbytes for tensor in written)
        versions = [(tensor, tensor._version) for tensor in written]

        def torn() -> str | None:
            changed = next((tensor for tensor, version in versions if tensor._version != version), None)
            return None if changed is None else f"A tensor of shape {tuple(changed.shape)}"

        self._sequence += 1
        record = {
            "format": disk.FORMAT,
            "run": self._slots.start["run"],
            "began": self._slots.start["began"],
            "sequence": self._sequence,
            "step": step,
            "ranks": self._ranks.count,
            **description,
        }
        self._thread = threading.Thread(
            target=self._copy,
            args=(record, together(files), nbytes, kept, torn),
            name="hf_offload-snapshot",
            daemon=True,
        )
        self._thread.start()
        if at_once or self._at_once:
            self.settle()

    def kept(self) -> Kept | None:
        """For what the next snapshot leaves on drives. None with parity: a machine that goes takes its drives with it."""
        return None if self._with_parity else Kept()

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
        torn, self._together.torn = self._together.torn, None
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
            self._slots.say_disk_error()

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
        if self._thread is None:
            self._slots.look()

    def leave(self) -> None:
        """Training has not ended well: the snapshots stay for the next one. Idempotent."""
        self._close(self._slots.leave)

    def over(
        self, number: str, release: Callable[[], None], others: Sequence[bytes] = (), before: int | None = None
    ) -> None:
        """The training ``number`` has ended well: the newest snapshot, or the newest of a step ``before`` it, stays until
        the process has. Then, ``release`` is called. Snapshot processes of other ranks listen at the addresses ``others``.
        """
        ended.over(number)
        kept = self._slots.over(before)
        if kept is None:
            release()
        else:
            ended.keep(self._slots.address, ended.Ended(*kept, release, others))

    def _close(self, how: Callable[[], None]) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = self._failure = None
        how()

    def _copy(
        self,
        record: dict[str, Any],
        files: dict[str, Write],
        nbytes: int,
        kept: Kept | None,
        torn: Callable[[], str | None],
    ) -> None:
        """In the thread."""
        try:
            self._together.snapshot(record, files, nbytes, kept, torn)
        except BaseException as error:
            self._failure = error
