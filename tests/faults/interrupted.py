"""Ctrl-C at any point of a training's step: what is sent, and what has to hold afterwards, whatever is on the drive."""

import gc
import itertools
import random
import signal
import sys
import threading
import time
from pathlib import Path

from hf_offload.errors import OffloadError
from tests.faults.numbered_steps import STEPS, values_in_memory
from tests.faults.test_interrupts import Points
from tests.helpers.package_threads import OurThreads
from tests.helpers.train import same

TIMEOUT_S = 60
SIGNALS = 200


class Moment:
    """Sends Ctrl-C after ``delay_s``, wherever the main thread is then: in any instruction, or in a function of C."""

    sent = True

    def __init__(self, delay_s):
        self._sender = threading.Thread(target=self._send, args=(delay_s, threading.get_ident()))

    @staticmethod
    def _send(delay_s, main):
        time.sleep(delay_s)
        signal.pthread_kill(main, signal.SIGINT)

    def __enter__(self):
        self._sender.start()

    def __exit__(self, *_):
        self._sender.join()


def open_files():
    return set(Path("/proc/self/fd").iterdir())


class Interrupted:
    """A training in memory, with the values after each of its steps, and how one on a drive compares with it.

    Attributes:
        training: Called with a folder, or None for a training in memory. It has ``step``, ``values`` and ``load``.
    """

    def __init__(self, training, folder):
        self.training = training
        self.folder = folder
        self.expected = values_in_memory(training)

    def points(self):
        points = Points()
        training = self.training(self.folder)
        training.step(0)
        self.run(training, points)
        return list(points.seen)

    def run(self, training, profiler):
        """The second step."""
        with profiler:
            training.step(1)

    def check(self, point):
        """Whether Ctrl-C was sent."""
        return self.interrupt(Points(point), point)

    def interrupt(self, profiler, point):
        """Whether Ctrl-C was sent, at what is called ``point`` in messages."""
        training = self.training(self.folder)
        training.step(0)
        noticed = False
        try:
            self.run(training, profiler)
        except KeyboardInterrupt:
            noticed = True
        finally:
            sys.setprofile(None)
        assert noticed == profiler.sent, f"Ctrl-C at {point} is lost"
        if profiler.sent:
            self.check_values(training, point)
        return profiler.sent

    def check_values(self, training, point):
        error = ""
        try:
            found = training.values()
        except OffloadError as raised:
            error = str(raised)
        if error:
            self.check_error(error, point)
            done = 1
            training.load(self.expected[done])
        else:
            matches = [self.alike(found, each) for each in self.expected]
            assert any(matches[1:3]), f"Neither the values before the step nor those after it, at {point}"
            done = matches.index(True, 1)
            self.go_on(training, self.expected[done])
        for number in range(done, STEPS):
            training.step(number)
        assert same(training.values(), self.expected[-1]), f"The run that goes on is another one, after {point}"
        training.optimizer.zero_grad()
        self.check_nothing_is_left(training, point)

    def alike(self, found, expected):
        """Whether these values are those of that many steps."""
        return same(found, expected)

    def go_on(self, training, expected):
        """What a user does before the training goes on from ``expected``."""

    def check_error(self, error, point):
        """Whether the training may end with this error."""
        raise NotImplementedError

    def check_nothing_is_left(self, training, point):
        """The training has ended."""
        raise NotImplementedError


def check_some(interrupted, count):
    """Ctrl-C at a few points of the step, and no thread of ours runs afterwards."""
    threads = OurThreads()
    points = interrupted.points()
    assert len(points) > 100
    # Not all points are passed in every step, for I/O takes its time.
    sent = (point for point in random.Random(0).sample(points, 4 * count) if interrupted.check(point))
    assert len(list(itertools.islice(sent, count))) == count
    for _ in range(2):  # what weak references are called for leaves garbage of its own
        gc.collect()
    threads.join(TIMEOUT_S)


def check_random(interrupted, count, seed=0):
    """Ctrl-C at so many random moments of the step: none is lost, and no thread or file of ours is left."""
    chance = random.Random(seed)
    assert interrupted.interrupt(Moment(0), "the beginning")  # what is opened once stays open
    gc.collect()
    threads, files = OurThreads(), open_files()
    training = interrupted.training(interrupted.folder)
    training.step(0)
    begin = time.perf_counter()
    training.step(1)
    step_s = time.perf_counter() - begin
    del training
    for number in range(count):
        delay_s = chance.uniform(0, step_s)
        assert interrupted.interrupt(Moment(delay_s), f"moment {number}, {1e3 * delay_s:.2f} ms")
    for _ in range(2):
        gc.collect()
    threads.join(TIMEOUT_S)
    assert open_files() <= files


def check_all(interrupted):
    """Ctrl-C at every point of the step."""
    points = interrupted.points()
    assert sum(map(interrupted.check, points)) > len(points) / 2


def used_bytes(store, expected):
    """Bytes of a store's slots: what is being moved yet is freed when that has ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        store.settle()
        store.collect()
        used = store.tier.stats.used_bytes
        if used <= expected or time.monotonic() > deadline:
            return used
        time.sleep(0.01)
