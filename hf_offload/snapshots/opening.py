"""The beginning of a training with snapshots: its snapshot process, and the snapshot that it goes on from."""

import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_offload.errors import OffloadConfigError, SnapshotError
from hf_offload.ranks import Ranks
from hf_offload.snapshots import ended
from hf_offload.snapshots.client import SnapshotClient, address_of
from hf_offload.snapshots.identity import Training, claim, release, training_of
from hf_offload.snapshots.restoring import Found, newest_whole
from hf_offload.surgery import InertInCopies

logger = logging.getLogger(__name__)

LINKS = ".hf_offload-snapshot"
_ORDERED = 3
"""So many numbers have sums that depend on their order."""


@dataclasses.dataclass
class Opened:
    """A connection to the snapshot process of a training, and what it goes on from.

    Attributes:
        training: The training, in all its runs.
        client: The connection.
        address: Where the process listens.
        run, began, sequence: Number, time of the beginning and last snapshot of the run that goes on, or a new one's.
        found: The snapshot; None to start at the beginning.
        directory: Where this rank's snapshots go from memory, if anywhere.
        place: Which training of its process it is that writes to this output directory, from 1 on.
    """

    training: Training
    client: SnapshotClient
    address: bytes
    run: str
    began: float
    sequence: int = 0
    found: Found | None = None
    directory: Path | None = None
    place: int = 1

    def forget_found(self) -> None:
        """Nothing of the snapshot is needed any more. Idempotent."""
        if self.found is not None:
            self.found.close()
            self.found = None

    def others(self, ranks: Ranks) -> list[bytes]:
        """Where the snapshot processes of the other ranks listen."""
        return [address_of(self.training.number, rank) for rank in range(ranks.count) if rank != ranks.number]

    def end_well(self) -> None:
        """The training is over, and needs its directory no more."""
        if self.directory is not None:
            release(self.directory, self.training)


def open_snapshots(
    output: Path,
    directory: Path | None,
    resume: bool,
    ranks: Ranks,
    checkpoint: str | None = None,
    *,
    unasked: bool = False,
) -> Opened:
    """Connect to the snapshot process of the training that writes to ``output``, or start it. With ``resume``, find the
    newest snapshot that is whole in all ranks, in memory or in ``directory``; else training goes on from ``checkpoint``, or
    begins. If the script has not asked for it (``unasked``), each of several trainings of a process that write to ``output``
    goes on from its own snapshot alone. All ranks call it.

    Raises :class:`~hf_offload.errors.SnapshotError` if another training is connected to it, if ``directory`` is that of
    another one, or for snapshots of another version.
    """
    training = ranks.first(lambda: training_of(output))
    if directory is not None:
        ranks.first(lambda: claim(directory, training))
    address = address_of(training.number, ranks.number)
    ended.before_another(address)
    client, status = ranks.each(lambda: _joined(output, address))
    run, began, place = ranks.first(lambda: (uuid.uuid4().hex, time.time(), ended.place_of(training.number)))
    ended.begin(training.number, place)
    opened = Opened(training, client, address, run, began, directory=directory if ranks.is_first else None, place=place)
    if not resume:
        if status["snapshots"]:
            newest = max(each["record"]["step"] for each in status["snapshots"])
            how = "starts at its beginning" if checkpoint is None else f"goes on from {checkpoint}"
            logger.warning(
                "Training %s, as was asked for: the snapshots that an earlier one has left in memory, the newest of step %d, "
                "are dropped.",
                how,
                newest,
            )
        return opened
    try:
        found = newest_whole(client, status, directory, training.number, output / links_of(ranks), ranks)
    except BaseException:
        client.close()
        raise
    if found is None:
        return opened
    record = found.record
    theirs = record.get("place", 1)
    if theirs != place and (unasked or theirs > place):
        logger.warning(
            "The snapshot of step %d is that of training number %d of its process with %s as its output directory, and this "
            "one is number %d: it %s. Give each training an output directory of its own.",
            found.step,
            theirs,
            output,
            place,
            "starts at its beginning" if unasked else "goes on from it, as was asked for",
        )
    if theirs != place and unasked:
        found.close()
        return opened
    ended.begin(training.number, theirs)
    return dataclasses.replace(
        opened, run=record["run"], began=record["began"], sequence=record["sequence"], found=found, place=theirs
    )


def links_of(ranks: Ranks) -> str:
    """In the output directory, while a training resumes from memory: links to files that have no name."""
    return LINKS if ranks.count == 1 else f"{LINKS}-{ranks.number}"


def _joined(output: Path, address: bytes) -> tuple[SnapshotClient, dict[str, Any]]:
    try:
        return _join(output, address)
    except ConnectionError as error:
        logger.warning("%s: another one is started.", str(error).capitalize())
    try:
        return _join(output, address)
    except ConnectionError as error:
        raise SnapshotError(f"Again, {error}: see whether the machine has memory.") from error


def _join(output: Path, address: bytes) -> tuple[SnapshotClient, dict[str, Any]]:
    client = SnapshotClient.connect(address, start=True)
    assert client is not None
    joined = client.ask("join")
    if "refused" in joined:
        client.close()
        if joined["refused"] == os.getpid():
            raise SnapshotError(
                f"This process takes snapshots of the training in {output} already: let that one end before another begins."
            )
        raise SnapshotError(
            f"Process {joined['refused']} trains already with {output} as its output directory, and takes "
            "snapshots: end it, or write to another directory."
        )
    return client, joined


def check_memory_files() -> None:
    """Raise :class:`~hf_offload.errors.OffloadConfigError` where the system has none."""
    if not hasattr(os, "memfd_create"):
        raise OffloadConfigError("snapshot_steps cannot be used here: snapshots need Linux. Leave it out.")


def warn_of_other_sums(models: Sequence[nn.Module], ranks: Ranks) -> None:
    """``models`` go on from a snapshot: warn at their next forward if DDP will sum their gradients in another order than the
    run that was stopped, which it does in the first step of a training unless it looks for unused parameters.
    """
    if ranks.count < _ORDERED:
        return
    for model in models:
        _Sums(model)


class _Sums:
    """Looks at the DDP that a model is in when it is first called by it."""

    def __init__(self, model: nn.Module):
        self._hook = model.register_forward_pre_hook(InertInCopies(self._look))

    def _look(self, model: nn.Module, args: Any) -> None:
        if not model.training:
            return
        self._hook.remove()
        found = DistributedDataParallel._get_active_ddp_module()
        if found is not None and (found.static_graph or not found.find_unused_parameters):
            logger.warning(
                "DDP of three or more processes sums the gradients of the first step after a resume in another order: the "
                "last bits may differ from those of a run that never stopped. With find_unused_parameters=True "
                "(ddp_find_unused_parameters=True of a Trainer), they do not."
            )
