"""Every error the package raises on purpose, and how a command ends that did not succeed.

All of them derive from :class:`OffloadError`, so ``except OffloadError`` is enough for a caller. Each message says what
happened, where, and what to do about it.
"""

EXIT_PROBLEM = 1
"""Something failed on the way, such as a full drive."""
EXIT_REFUSED = 2
"""Wrong settings or arguments: nothing was begun."""
EXIT_INTERRUPTED = 130
"""Ctrl-C."""


class OffloadError(RuntimeError):
    """Base class of the package's errors.

    Attributes:
        exit_code: How a command or a launched script ends that raises it: 1 for an error on the way, 2 for a refusal.
    """

    exit_code = EXIT_PROBLEM


class OffloadConfigError(OffloadError, ValueError):
    """A setting is wrong, or two settings cannot go together. Raised before anything is touched.

    Attributes:
        problems: The single errors, if the message lists several.
    """

    exit_code = EXIT_REFUSED
    problems: tuple[str, ...] = ()


class OffloadPlanError(OffloadError):
    """No plan can be made: the budget is below what the model needs, or the model cannot be counted.

    ``smallest_bytes`` is the smallest budget that would do, where it is known.
    """

    exit_code = EXIT_REFUSED

    def __init__(self, message: str, smallest_bytes: int | None = None):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class TierFullError(OffloadError):
    """A storage tier has no room for a buffer. The engine keeps the tensor in memory instead."""


class WriteLimitError(TierFullError):
    """``max_disk_write_bytes`` are spent. Where it can, what would have been written stays in memory instead."""


class StorageError(OffloadError):
    """Bytes could not be written to, or read back from, a storage tier."""


class StandstillError(StorageError):
    """A tier has stopped answering: transfers are on their way and none of them ends."""


class SavedTensorModifiedError(OffloadError):
    """A tensor was changed in place between being saved and being needed: its gradient would be wrong.

    Plain autograd raises a ``RuntimeError`` here. Saved-tensor hooks switch that check off; the engine switches it on again.
    """


class RecomputeError(OffloadError):
    """A parameter, a buffer or an input of a block has changed between its forward and its recompute in backward.

    Raised before the optimizer's step. A block whose forward writes to its buffers in a measured step is never recomputed.
    """


class SnapshotError(OffloadError):
    """A snapshot of a training cannot be taken, or none can be restored."""
