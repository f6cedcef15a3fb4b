"""Much at once, and much in all: ``python -m tests.faults.load 100`` moves so many GB through a quota of 4.

Writes and reads back, compared byte by byte, far more than the tier may occupy, so that room is used again and again.
"""

import collections
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from hf_offload.errors import TierFullError
from hf_offload.storage.buffers import empty_at_phase
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.tier import Slot

MIB = 1 << 20


class Load:
    """Threads that store, load and free through one tier until ``total_bytes`` have been written.

    Together they want to keep more than ``quota_bytes``, so that the tier is full most of the time: who gets no room takes
    back what it stored first.
    """

    def __init__(self, tier: DiskTier, quota_bytes: int, total_bytes: int, slot_bytes: int, seed: int = 0):
        self.tier = tier
        self.quota_bytes = quota_bytes
        self.total_bytes = total_bytes
        self.slot_bytes = slot_bytes
        self.done_bytes = 0
        self.errors: list[str] = []
        self._lock = threading.Lock()
        # What is written is cut from here: making new random bytes would take longer than writing them.
        self._source = empty_at_phase(2 * slot_bytes, 64)
        self._source.random_(0, 256, generator=torch.Generator().manual_seed(seed))

    def run(self, threads: int) -> float:
        """Seconds it took."""
        begin = time.perf_counter()
        keep = 2 * self.quota_bytes // (threads * self.slot_bytes) + 1
        workers = [threading.Thread(target=self._work, args=(seed, keep)) for seed in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - begin

    def _work(self, seed: int, keep: int) -> None:
        chance = random.Random(seed)
        into = empty_at_phase(self.slot_bytes, 64)
        stored: collections.deque[tuple[Slot, torch.Tensor]] = collections.deque()

        def take_back() -> None:
            slot, data = stored.popleft()
            found = into[: slot.nbytes]
            self.tier.read(slot, found, urgent=chance.random() < 0.5).result()
            self.tier.free(slot)
            if not torch.equal(found, data):
                raise RuntimeError(f"{slot.nbytes} bytes came back different")

        try:
            while self._goes_on():
                nbytes = chance.choice(
                    [self.slot_bytes, self.slot_bytes // 2 + 512, chance.randrange(1, self.slot_bytes)]
                )
                start = chance.randrange(self.slot_bytes)
                data = self._source[start : start + nbytes]
                while (slot := self._room(nbytes)) is None:
                    take_back() if stored else time.sleep(0.001)
                stored.append((slot, data))
                self.tier.write(slot, data).result()
                with self._lock:
                    self.done_bytes += nbytes
                if len(stored) > keep:
                    take_back()
            while stored:
                take_back()
        except BaseException as error:
            with self._lock:
                self.errors.append(f"{type(error).__name__}: {error}")

    def _goes_on(self) -> bool:
        with self._lock:
            return self.done_bytes < self.total_bytes and not self.errors

    def _room(self, nbytes: int) -> Slot | None:
        try:
            return self.tier.reserve(nbytes)
        except TierFullError:
            return None


def main(gigabytes: float = 100) -> int:
    torch.set_num_threads(1)
    quota, threads = 4 * 10**9, 64
    tier = DiskTier(Path(tempfile.gettempdir()), budget_bytes=quota)
    load = Load(tier, quota, int(gigabytes * 1e9), 16 * MIB)
    seconds = load.run(threads)
    occupied, used, most = tier.occupied_bytes, tier.stats.used_bytes, tier.stats.peak_used_bytes
    tier.close()
    problems = [*load.errors]
    problems += [f"{occupied} bytes of disk were occupied"] * (occupied > quota)
    problems += [f"{used} bytes are left in use"] * (used > 0)
    line = (
        f"{load.done_bytes / 1e9:.1f} GB stored and read back by {threads} threads in {seconds:.0f} s, at most "
        f"{most / 1e9:.2f} GB at once, {occupied / 1e9:.2f} GB of disk occupied, {len(problems)} errors"
    )
    sys.stdout.write("\n".join([*problems, line]) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:])))
