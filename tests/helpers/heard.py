"""What a run logs, and the budget that it names for batches that came later than its first plan."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """Warnings of the package inside the block, which are not shown."""
    logger, listener, disabled = logging.getLogger("hf_offload"), _Listener(), logging.root.manager.disable
    logging.disable(logging.NOTSET)
    logger.addHandler(listener)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield listener.heard
    finally:
        logger.removeHandler(listener)
        logger.propagate = propagates
        logging.disable(disabled)


def named_later(heard: Sequence[str]) -> int | None:
    """Bytes of the budget that the warning of batches without a plan names; None if there is none."""
    found = [re.search(r"(?:can do with is|run needs) (\d+) MiB", one) for one in heard if one.startswith("Batches")]
    return max((int(one[1]) << 20 for one in found if one), default=None)
