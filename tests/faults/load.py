"""Much at once, and much in all: ``python -m tests.faults.load --gigabytes 100``.

Writes and reads back, compared byte by byte, far more than the tier may occupy, so that room is used again and again;
``--processes 4`` does so in that many processes that share a directory, each with threads and a quota of its own.
"""

import argparse
import collections
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from rich.progress import Progress

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

    def run(self, threads: int, progress: Progress | None = None) -> float:
        """Seconds it took."""
        begin = time.perf_counter()
        task = None if progress is None else progress.add_task("GB written", total=self.total_bytes / 1e9)
        keep = 2 * self.quota_bytes // (threads * self.slot_bytes) + 1
        workers = [threading.Thread(target=self._work, args=(seed, keep)) for seed in range(threads)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                while worker.is_alive():
                    worker.join(1.0)
                    if progress is not None and task is not None:
                        progress.update(task, completed=self.done_bytes / 1e9)
        except KeyboardInterrupt:  # tell what was done until then
            self.total_bytes = 0
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=100)
    parser.add_argument("--quota-gigabytes", type=float, default=4)
    parser.add_argument("--slot-mebibytes", type=float, default=16)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    return run_alone(args) if args.processes == 1 else run_side_by_side(args)


def run_side_by_side(args: argparse.Namespace) -> int:
    """Every process tells its own figures; a file that any of them leaves is an error."""
    command = [sys.executable, "-m", "tests.faults.load"]
    for name in ("gigabytes", "quota_gigabytes", "slot_mebibytes", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        processes = [subprocess.Popen([*command, "--directory", folder]) for _ in range(args.processes)]
        codes = [process.wait() for process in processes]
        left = list(Path(folder).iterdir())
    sys.stdout.write(f"{args.processes} processes, {sum(map(bool, codes))} of them failed, {len(left)} files left\n")
    return 1 if left or any(codes) else 0


def run_alone(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    quota = int(args.quota_gigabytes * 1e9)
    tier = DiskTier(args.directory, budget_bytes=quota)
    load = Load(tier, quota, int(args.gigabytes * 1e9), int(args.slot_mebibytes * MIB), seed=os.getpid())
    with Progress(disable=not sys.stderr.isatty()) as progress:
        seconds = load.run(args.threads, progress)
    occupied, used, most = tier.occupied_bytes, tier.stats.used_bytes, tier.stats.peak_used_bytes
    written = tier.stats.written_bytes
    tier.close()
    problems = [*load.errors]
    problems += [f"{occupied} bytes of disk were occupied"] * (occupied > quota) + [f"{used} bytes are left in use"] * (
        used > 0
    )
    line = (
        f"{load.done_bytes / 1e9:.1f} GB stored ({written / 1e9:.1f} GB of it on disk) and read back by {args.threads} "
        f"threads in {seconds:.0f} s, at most {most / 1e9:.2f} GB at once, {occupied / 1e9:.2f} GB of disk occupied, "
        f"{len(problems)} errors"
    )
    sys.stdout.write("\n".join([*problems, line]) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
