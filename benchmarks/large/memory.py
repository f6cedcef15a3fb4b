"""What memory holds over a step, by kind."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hf_offload.session import OffloadSession
from hf_offload.state.optimizer import streaming_of
from hf_offload.storage.host_memory import process_bytes
from hf_offload.training.gauges import Gauge

INTERVAL_S = 0.1
WEIGHTS, WEIGHTS_MOVING, STATE, GRADIENTS, ACTIVATIONS, OTHER = KINDS = (
    "weights",
    "weights on their way",
    "optimizer state on its way",
    "gradients on their way",
    "activations",
    "everything else",
)
"""Everything else: gradients that are computed, the loss, results of operations, PyTorch and Python themselves."""

Sample = dict[str, float]


def counters(session: OffloadSession, optimizer: Any) -> dict[str, Callable[[], int]]:
    """Bytes in memory, by kind. What a plan leaves in memory is in everything else."""
    residency, streaming, engine = session.residency, streaming_of(optimizer), session._engine
    assert engine is not None
    found = dict.fromkeys((WEIGHTS, WEIGHTS_MOVING, STATE, GRADIENTS), lambda: 0)
    if residency is not None:
        found[WEIGHTS] = lambda: residency.bytes_in_memory
        found[WEIGHTS_MOVING] = lambda: residency.store.buffer_bytes
    if streaming is not None:
        gradients = streaming.gradient_store
        found[STATE] = lambda: streaming.state_store.buffer_bytes
        if gradients is not None:
            found[GRADIENTS] = lambda: gradients.buffer_bytes
    return {**found, ACTIVATIONS: lambda: engine.transfer.ledger.resident_bytes}


@contextlib.contextmanager
def sampled(kinds: Mapping[str, Callable[[], int]], gauge: Gauge) -> Iterator[list[Sample]]:
    """Samples of all kinds every :data:`INTERVAL_S` seconds, each with its ``time_s``, the ``resident`` bytes of the process,
    and those of them that are ``anonymous``: the rest are cached pages of files, which the system takes back at any time.
    """
    samples: list[Sample] = []
    over = threading.Event()
    begin = time.perf_counter()

    def sample() -> None:
        one: Sample = {
            "time_s": time.perf_counter() - begin,
            "resident": gauge.level(),
            "anonymous": process_bytes(),
        }
        with contextlib.suppress(RuntimeError):  # a set has changed meanwhile
            one |= {kind: count() for kind, count in kinds.items()}
            one[OTHER] = max(0, one["resident"] - sum(one[kind] for kind in kinds))
            samples.append(one)

    def keep_sampling() -> None:
        while not over.wait(INTERVAL_S):
            sample()

    sample()
    thread = threading.Thread(target=keep_sampling, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
        sample()
