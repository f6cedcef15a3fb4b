"""Taking snapshots: files in memory, whose descriptors the snapshot process has, too.

Note: consistency
    A snapshot is copied at the end of a step, while nothing changes. The record, with names, sizes and checksums, is the last
    that the snapshot process receives: a snapshot without one does not exist. The newest whole one is not written to.

Note: ranks
    Each rank copies by itself, and all drop what one of them could not copy. Some may be killed before they have committed a
    snapshot, and others after: so the one before stays until all are known to have committed this one.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_offload.errors import OffloadConfigError, OffloadError, SnapshotError, TierFullError
from hf_offload.ranks import Ranks
from hf_offload.settings.schema import OffloadConfig, snapshots_held
from hf_offload.settings.sizes import format_bytes
from hf_offload.snapshots import disk, parity
from hf_offload.snapshots.client import SnapshotClient, address_of
from hf_offload.snapshots.contents import Content, MemoryFile, small_file
from hf_offload.snapshots.restoring import LINKS, Found, check_format, newest_whole, snapshots_in, training_of
from hf_offload.storage.host_memory import ram_bytes
from hf_offload.storage.service import HeldRam, RunStorage

logger = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 20
"""For small things, and what archives add."""
_ended: set[str] = set()
"""Trainings that have ended well in this process, by number."""


class Snapshots:
    """The snapshots of one training: which it goes on from, and which it takes.

    Raises :class:`~hf_offload.errors.OffloadConfigError` on systems without files in memory.

    Attributes:
        mark: The training and its run, see :func:`~hf_offload.snapshots.restoring.training_of`.
        found: The snapshot to go on from; None to start at the beginning, and once nothing of it is needed any more.
        taken: How many are whole.
        stalled_s: Seconds that training has waited for them.
    """

    def __init__(self, output: Path, config: OffloadConfig, ranks: Ranks):
        if not hasattr(os, "memfd_create"):
            raise OffloadConfigError("snapshot_steps cannot be used here: snapshots need Linux. Leave it out.")
        self.mark: dict[str, Any] = {}
        self.found: Found | None = None
        self.taken = 0
        self.stalled_s = 0.0
        self._output = output
        self._config = config
        self._directory = None if config.snapshot_dir is None else Path(os.fspath(config.snapshot_dir)).resolve()
        self._ranks = ranks
        self._client: SnapshotClient | None = None
        self._run: dict[str, Any] = {}
        self._held: HeldRam | None = None
        self._newest: int | None = None  # step of the newest that all ranks have
        self._files: dict[int, list[MemoryFile]] = {}  # by step
        self._free: list[list[MemoryFile]] = []  # of snapshots that were dropped

    # -- the beginning ------------------------------------------------------------------------------------------------------

    def open(self, resume: bool, checkpoint: str | None = None, *, is_asked: bool = True) -> Found | None:
        """Connect to the snapshot process of the training, or start it. With ``resume``, find the newest snapshot that is
        whole in all ranks; else training goes on from ``checkpoint``, or begins. Unless it ``is_asked``, the script has not
        said whether to resume. All ranks call it.

        Raises :class:`~hf_offload.errors.SnapshotError` if another training is connected to it, if ``snapshot_dir`` is that
        of another one, or for snapshots of another version or number of processes.
        """
        ranks, output = self._ranks, self._output
        mark = self.mark = ranks.first(lambda: training_of(output))
        on_disk = ranks.first(lambda: snapshots_in(self._directory, mark))
        if mark["training"] in _ended and not (resume and is_asked) and checkpoint is None:
            raise SnapshotError(
                f"This process has trained in {output} already, and a restart would take one training for the other: give "
                "each an output directory of its own, or go on with resume_from_checkpoint=True."
            )
        client = ranks.each(self._joined)
        if resume:
            ranks.each(lambda: check_format(client.status, "in memory"))
            links = output / (LINKS if ranks.count == 1 else f"{LINKS}-{ranks.number}")
            self.found = newest_whole(client, mark["run"], on_disk, links, ranks)
            return self.found
        self.begin_run()
        if client.status["snapshots"]:
            logger.warning(
                "Training %s, as was asked for: the snapshots that an earlier one has left in memory, the newest of step %d, "
                "are dropped.",
                "starts at its beginning" if checkpoint is None else f"goes on from {checkpoint}",
                max(each["step"] for each in client.status["snapshots"]),
            )
        return None

    def _joined(self) -> SnapshotClient:
        client = SnapshotClient.connect(address_of(self.mark["training"], self._ranks.number))
        if "refused" in client.status:
            client.close()
            raise SnapshotError(
                f"Process {client.status['refused']} trains already with {self._output} as its output directory, and takes "
                "snapshots: end it, or write to another directory."
            )
        self._client = client
        return client

    def begin_run(self) -> None:
        """Training does not go on from a snapshot: another run begins. All ranks call it."""
        self.mark = self._ranks.first(lambda: training_of(self._output, begins=True))

    def begin(self, storage: RunStorage) -> None:
        """Training begins. All ranks call it.

        Raises :class:`~hf_offload.errors.SnapshotError` if nothing can be written to ``snapshot_dir``.
        """
        is_resumed = self.found is not None and self.found.record["run"] == self.mark["run"]
        self._newest = self.found.step if self.found is not None and is_resumed else None
        self._held = self._held or HeldRam(storage, "snapshots")
        self._run = {
            "run": self.mark["run"],
            "directory": None if self._directory is None or not self._ranks.is_first else str(self._directory),
            "wait_s": float(self._config.snapshot_wait_s),
        }
        errors = self._ranks.gather(self._ranks.each(lambda: self._ask("start", **self._run)["error"]))
        error = next((each for each in errors if each is not None), None)
        if error is not None:
            raise SnapshotError(
                f"Snapshots cannot be written to {self._directory}: {error}. Name another snapshot_dir, or none."
            )

    def forget_found(self) -> None:
        """Nothing of the snapshot that training goes on from is needed any more. Idempotent."""
        if self.found is not None:
            self.found.close()
            self.found = None

    # -- while training -----------------------------------------------------------------------------------------------------

    def take(self, step: int, prepare: Callable[[], tuple[dict[str, Content], dict[str, bytes]]]) -> None:
        """Take a snapshot of ``step``, the number of optimizer steps so far. ``prepare`` returns what files hold, by their
        names, and what small ones do that each rank has of its own: the snapshot of each has those of all, and is a whole
        checkpoint. All ranks call it.

        Raises :class:`~hf_offload.errors.SnapshotError` or :class:`~hf_offload.errors.TierFullError` if the first one fails.
        A later one that fails is a warning: the one before stays.
        """
        began = time.perf_counter()
        try:
            self._take(step, *self._ranks.each(prepare))
        except (SnapshotError, TierFullError) as failure:
            if self.taken == 0:
                raise
            logger.warning("A snapshot was not taken: %s The one before stays.", failure)
        finally:
            self.stalled_s += time.perf_counter() - began

    def _take(self, step: int, files: dict[str, Content], own: dict[str, bytes]) -> None:
        """Copy, and commit what all ranks have copied. An error of one of them is one of all."""
        ranks = self._ranks
        everyone = ranks.gather((step, own))
        if any(other != step for other, _ in everyone):
            steps = ", ".join(str(other) for other, _ in everyone)
            raise OffloadError(f"Ranks take snapshots of different steps, {steps}: all have to end the same steps.")
        files |= {name: small_file(content) for _, others in everyone for name, content in others.items()}
        written = ranks.each(lambda: self._written(step, files))
        sizes = [[file.nbytes, file.checksum] for file in written]
        record: dict[str, Any] = {
            **self.mark,
            "format": disk.FORMAT,
            "step": step,
            "ranks": ranks.count,
            "files": [[name, *each] for name, each in zip(files, sizes, strict=True)],
        }
        if self._config.snapshot_parity:
            peers = record["peers"] = ranks.gather(sizes)
            row = ranks.each(lambda: self._parity(self._files[step][len(written)], written, peers))
            record["parity"] = [row.nbytes, row.checksum]
            written = [*written, row]
        ranks.each(lambda: self._ask("commit", [file.number for file in written], record=record))
        self._newest = step
        self.taken += 1

    def _written(self, step: int, files: Mapping[str, Content]) -> list[MemoryFile]:
        nbytes = sum(content.nbytes for content in files.values())
        nbytes += nbytes // (self._ranks.count - 1) if self._config.snapshot_parity else 0
        answer = self._ask("keep", step=self._newest)
        if answer["error"] is not None:
            logger.warning(
                "A snapshot was not written to %s: %s. Those in memory are whole.", self._directory, answer["error"]
            )
        for dropped in self._files.keys() - set(answer["held"]):
            self._free.append(self._files.pop(dropped))
        present = self._files[step] = self._free.pop() if self._free else []
        self._make_room(nbytes + _SPARE_BYTES, sum(file.nbytes for file in present))
        try:
            present += [MemoryFile(nbytes) for _ in range(len(files) + 1 - len(present))]  # one is for parity
            for file, content in zip(present, files.values(), strict=False):
                file.begin()
                content.write(file)
                file.end()
        except OSError as error:
            for file in present:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.number, 0)
            raise self._no_room(nbytes, error) from error
        return present[: len(files)]

    def _parity(self, row: MemoryFile, written: list[MemoryFile], peers: parity.Peers) -> MemoryFile:
        row.begin()
        try:
            parity.take(self._ranks, peers, [file.number for file in written], row)
            row.end()
        except OSError as error:
            raise self._no_room(row.nbytes, error) from error
        return row

    def _make_room(self, nbytes: int, present: int) -> None:
        """Take the bytes from the budget, and see that the machine has them."""
        assert self._held is not None
        all_sets = [*self._free, *self._files.values()]
        total = sum(file.nbytes for files in all_sets for file in files) - present + nbytes
        more = total - sum(self._held.held.values())
        if more > 0:
            try:
                self._held.hold({f"up to {total}": more})
            except TierFullError as error:
                raise TierFullError(
                    f"A snapshot needs {format_bytes(nbytes)}, and memory holds {snapshots_held(self._config)}. {error} "
                    "Raise ram_budget, or drop snapshot_steps."
                ) from error
        available = ram_bytes()[1]
        if available is not None and (nbytes - present) * self._ranks.local_count > available:
            raise self._no_room(nbytes, f"{format_bytes(available)} are available")

    def _no_room(self, nbytes: int, why: object) -> SnapshotError:
        return SnapshotError(
            f"There is no room in shared memory for a snapshot of {format_bytes(nbytes)}: {why}. Snapshots take "
            f"{snapshots_held(self._config)} times that: free memory, raise its limit, or drop snapshot_steps."
        )

    def _ask(self, what: str, files: list[int] | None = None, **values: Any) -> dict[str, Any]:
        """The answer to a message: that of another process if this one has ended, and all it held is lost.

        Raises :class:`~hf_offload.errors.SnapshotError` if that one ends as well.
        """
        assert self._client is not None
        try:
            return self._client.ask(what, files or (), **values)
        except ConnectionError:
            self._client.close()
        logger.warning("The snapshot process has ended, by a signal or for lack of memory: another one is started.")
        try:
            client = self._joined()
            client.ask("start", **self._run)
            return client.ask(what, files or (), **values)
        except ConnectionError as error:
            raise SnapshotError(f"The snapshot process has ended again: {error}.") from error

    # -- the end ------------------------------------------------------------------------------------------------------------

    def end(self, well: bool) -> None:
        """Training has ended. If not ``well``, the snapshots stay for the next start; else all ranks call it. Idempotent."""
        self.forget_found()
        if self._client is None:
            return
        try:
            if well:
                self._ranks.gather(None)  # if one fails here, the others keep what it needs to go on
                logger.info(
                    "%d snapshots were taken, for which training waited %.2f s in all.", self.taken, self.stalled_s
                )
                self._client.end()
                _ended.add(self.mark["training"])
            else:
                self._client.close()
        finally:
            self._client = None
            for file in [file for files in [*self._free, *self._files.values()] for file in files]:
                file.close()
            if self._held is not None:
                self._held.release(list(self._held.held))
