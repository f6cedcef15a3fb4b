"""Taking snapshots: files in memory, written while training goes on and whole before the weights change.

Note: consistency
    A snapshot is begun at the end of a step. Small things are copied at once. A thread copies weights and optimizer state
    during the forward and the backward of the next step; :meth:`Snapshots.settle` waits for it before the optimizer steps.
    The version counter of each tensor is compared at the end: if something has changed, the snapshot is dropped, the one
    before stays, and later ones are copied at once. The record, with names, sizes and checksums, is the last that the
    snapshot process receives: a snapshot without one does not exist.

Note: ranks
    Each rank copies by itself, and all drop what one of them could not copy. Some may be killed before they have committed a
    snapshot, and others after: so the one before stays until all are known to have committed this one.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_offload.errors import SnapshotError, TierFullError
from hf_offload.ranks import Ranks
from hf_offload.settings.schema import OffloadConfig, snapshots_held
from hf_offload.snapshots import disk, parity, retained
from hf_offload.snapshots.memory import Write
from hf_offload.snapshots.restoring import Opened
from hf_offload.snapshots.slots import Slots
from hf_offload.storage.service import HeldRam, RunStorage
from hf_offload.surgery import InertInCopies

logger = logging.getLogger(__name__)


def directory_of(config: OffloadConfig) -> Path | None:
    """Where snapshots go from memory, if anywhere."""
    return None if config.snapshot_dir is None else Path(os.fspath(config.snapshot_dir)).resolve()


class Snapshots:
    """The snapshots that one training takes.

    Attributes:
        taken: How many are whole.
        stalled_s: Seconds that training has waited for them.
    """

    def __init__(self, opened: Opened, config: OffloadConfig, storage: RunStorage, ranks: Ranks):
        self.taken = 0
        self.stalled_s = 0.0
        self._opened = opened
        self._config = config
        self._storage = storage
        self._ranks = ranks
        self._slots = Slots(opened, HeldRam(storage, "snapshots"), snapshots_held(config), ranks.local_count)
        self._sequence = opened.sequence
        self._run: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._waits_since: float | None = None
        self._failure: BaseException | None = None
        self._torn: str | None = None
        self._at_once = False
        self._hooks: list[Any] = []
        storage.settle_copies = self.settle

    def start(self) -> None:
        """Begin the run of what was opened. All ranks call it.

        Raises :class:`~hf_offload.errors.SnapshotError` if nothing can be written to ``snapshot_dir``.
        """
        training, run, found = self._opened.training, self._opened.run, self._opened.found
        self._run = {
            "format": disk.FORMAT,
            "run": run,
            "began": self._opened.began,
            "training": training.number,
            "output": training.output,
        }
        directory = directory_of(self._config) if self._ranks.is_first else None
        settings = {
            **self._run,
            "directory": None if directory is None else str(directory),
            "wait_s": float(self._config.snapshot_wait_s),
        }
        goes_on = found is not None and found.record["run"] == run
        self._ranks.each(lambda: self._slots.begin_run(settings, found if goes_on else None))

    def settle_before_steps_of(self, optimizer: Any) -> None:
        """Have every step of ``optimizer`` wait for the copy. For one without such hooks, snapshots are copied at once."""
        while hasattr(optimizer, "optimizer"):  # in accelerate's wrapper
            optimizer = optimizer.optimizer
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is None:
            self._at_once = True
        else:
            self._hooks.append(register(InertInCopies(lambda *_: self.settle())))

    def take(
        self,
        step: int,
        files: Mapping[str, Write],
        watched: Iterable[Tensor],
        description: Mapping[str, Any],
        at_once: bool = False,
    ) -> None:
        """Begin a snapshot of ``step``.

        Args:
            step: Optimizer steps so far.
            files: Name -> what writes its content.
            watched: The tensors whose bytes are written, which must stay as they are until :meth:`settle`.
            description: Goes into the record.
            at_once: Whether to write it now.

        Raises :class:`~hf_offload.errors.SnapshotError` or :class:`~hf_offload.errors.TierFullError` if there is no room for
        the first one. A later one that fails is a warning: the one before stays.
        """
        self.settle()
        versions = [(tensor, tensor._version) for tensor in watched]

        def torn() -> str | None:
            changed = next((tensor for tensor, version in versions if tensor._version != version), None)
            return None if changed is None else f"A tensor of shape {tuple(changed.shape)}"

        self._sequence += 1
        record = {**self._run, "sequence": self._sequence, "step": step, "ranks": self._ranks.count, **description}
        nbytes = sum(tensor.nbytes for tensor, _ in versions)
        arguments = record, dict(files), nbytes, torn
        self._thread = threading.Thread(target=self._copy, args=arguments, name="hf_offload-snapshot", daemon=True)
        self._thread.start()
        if at_once or self._at_once:
            self.settle()

    def settle(self) -> None:
        """Wait until the snapshot that was begun is whole: the weights may change then. Raises as :meth:`take` does."""
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
            self.refuse(failure)
        else:
            self.taken += 1
            error, self._slots.disk_error = self._slots.disk_error, None
            if error is not None:
                directory = directory_of(self._config)
                logger.warning("A snapshot was not written to %s: %s. Those in memory are whole.", directory, error)

    def refuse(self, failure: BaseException) -> None:
        """Raise the ``failure`` of the first snapshot. That of a later one is a warning: the one before stays."""
        if self.taken == 0 or not isinstance(failure, (OSError, SnapshotError, TierFullError)):
            raise failure
        logger.warning("A snapshot was not taken: %s The one before stays.", failure)

    @contextlib.contextmanager
    def waited(self) -> Iterator[None]:
        """Training waits for what is done inside, such as a snapshot that is gathered."""
        began, self._waits_since = self._waits_since, self._waits_since or time.perf_counter()
        try:
            yield
        finally:
            if began is None:
                self.stalled_s += time.perf_counter() - self._waits_since
            self._waits_since = began

    def look(self) -> None:
        """Have another snapshot process keep what there is, should this one have ended. Costs a system call."""
        if self._thread is None:
            self._slots.look()

    def leave(self) -> None:
        """Training has not ended well: the snapshots stay for the next one. Idempotent."""
        if self._thread is not None:
            self._thread.join()
            self._thread = self._failure = None
        self._detach()
        self._slots.leave()

    def over(self, before: int | None = None) -> None:
        """Training has ended well: the newest snapshot, or the newest of a step ``before`` this one, stays until the script
        has. All ranks call it.
        """
        try:
            self.settle()
            self._ranks.gather(None)  # if one fails here, the others keep what it needs to go on
            logger.info("%d snapshots were taken, for which training waited %.2f s in all.", self.taken, self.stalled_s)
            retained.note_end(self._opened.training.number)
        finally:
            self._detach()
            self._slots.over(before)

    def _detach(self) -> None:
        self._storage.settle_copies = None
        while self._hooks:
            self._hooks.pop().remove()

    # -- in the thread that copies ------------------------------------------------------------------------------------------

    def _copy(
        self, record: dict[str, Any], files: dict[str, Write], nbytes: int, torn: Callable[[], str | None]
    ) -> None:
        try:
            self._snapshot(record, files, nbytes, torn)
        except BaseException as error:
            self._failure = error

    def _snapshot(
        self, record: dict[str, Any], files: dict[str, Write], nbytes: int, torn: Callable[[], str | None]
    ) -> None:
        """Copy, and commit what all ranks have copied; not if something is ``torn`` in one of them. An error of one of them
        is one of all.
        """
        slots, step, sequence = self._slots, record["step"], record["sequence"]
        with_parity = self._config.snapshot_parity > 0
        more_bytes = nbytes // (self._ranks.count - 1) if with_parity else 0
        written, failure = _tried(lambda: slots.again(lambda: slots.write(sequence, files, nbytes, more_bytes)))
        numbers = [file.number for file in written or ()]
        listed = [[name, file.nbytes, file.checksum] for name, file in zip(files, written or (), strict=False)]
        record = {**record, "files": listed}
        if self._is_dropped(step, torn(), failure):
            return
        if with_parity:
            stream, row = parity.Stream(record, numbers), slots.parity_file(sequence, len(numbers))
            sizes = self._tell(stream.nbytes)
            described, failure = _tried(lambda: parity.take(self._ranks, stream, sizes, row))
            if isinstance(failure, OSError):
                failure = slots.no_room(nbytes, failure)
            if self._is_dropped(step, None, failure):
                return
            row.end()
            record, numbers = {**record, parity.NAME: described}, [*numbers, row.number]
        _, failure = _tried(lambda: slots.again(lambda: slots.commit(record, numbers)))
        if not self._is_dropped(step, None, failure):
            slots.newest = sequence

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
                self._torn = f"{who}{other_torn}"
                return True
        return False

    def _tell(self, value: Any) -> list[Any]:
        try:
            return self._ranks.gather(value)
        except RuntimeError as error:
            raise SnapshotError(f"Another process of the training does not answer: {error}.") from error


def _tried(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What ``work`` returns, or its error: the other ranks have to know."""
    try:
        return work(), None
    except Exception as error:
        return None, error
