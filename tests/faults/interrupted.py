"""Ctrl-C at any point of a training's step: what is sent, and what has to hold afterwards, whatever is on the drive.

Python runs a signal's handler where it calls a function or returns from one of C. Both are events of a profiler, so that a
signal can be sent at every such point of the package, one after the other.
"""

import gc
import itertools
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import hf_offload
from hf_offload.errors import OffloadError
from hf_offload.interrupts import signals_deferred
from tests.faults.numbered_steps import STEPS, values_after_steps
from tests.helpers.package_threads import OurThreads, open_files
from tests.helpers.train import same

PACKAGE = str(Path(hf_offload.__file__).parent)
TIMEOUT_S = 60
SIGNALS = 200


class Points:
    """A profiler that notes each point of the package at which a handler can run, or sends a signal at one of them."""

    def __init__(self, wanted=None):
        self.seen = {}
        self.sent = False
        self._wanted = wanted

    def __enter__(self):
        sys.setprofile(self._event)

    def __exit__(self, *_):
        sys.setprofile(None)

    def _event(self, frame, event, _):
        if event not in ("call", "c_return"):
            return
        if self._wanted is not None and (self.sent or (frame.f_code.co_name, frame.f_lasti) != self._wanted[1:3]):
            return  # before the search for what led here, which takes longer than the step
        if frame.f_code.co_name == "<genexpr>" and event == "call" and frame.f_lasti > 0:
            return  # it may be on its way out: no instruction of it runs, and so no handler
        point = _point(frame, event)
        if point is None:
            return
        if self._wanted is None:
            self.seen[point] = None
        elif point == self._wanted:
            self.sent = True
            signal.raise_signal(signal.SIGINT)


def _point(frame, event):
    """Where ``frame`` is, and the line of the package that led there; None outside of the package."""
    here = (frame.f_code.co_filename, frame.f_code.co_name, frame.f_lasti, event)
    for _ in range(10):
        if frame is None:
            return None
        if frame.f_code.co_filename.startswith(PACKAGE):
            return (*here, frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


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


class Interrupted:
    """A training in memory, with the values after each of its steps, and how one on a drive compares with it.

    Attributes:
        training: Called with a folder, or None for a training in memory. It has ``step``, ``values`` and ``load``.
        before: Steps before the one that is interrupted.
        steps_in_memory: An optimizer in memory has taken a part of its step when it is interrupted: that comes later.
    """

    before = 1
    steps_in_memory = False

    def __init__(self, training, folder, expected=None):
        self.training = training
        self.folder = folder
        self.expected = values_after_steps(training(None)) if expected is None else expected

    def begun(self):
        training = self.training(self.folder)
        for number in range(self.before):
            training.step(number)
        return training

    def points(self):
        points, training = Points(), self.begun()
        self.run(training, points)
        training.session.detach()
        return list(points.seen)

    def run(self, training, profiler):
        """The step that is interrupted."""
        if not self.steps_in_memory:
            with profiler:
                training.step(self.before)
            return
        step, training.optimizer.step = training.optimizer.step, lambda: None
        try:
            with profiler:
                training.step(self.before)
        finally:
            training.optimizer.step = step
        training.optimizer.step()

    def check(self, point):
        """Whether Ctrl-C was sent."""
        return self.interrupt(Points(point), point)

    def interrupt(self, profiler, point):
        """Whether Ctrl-C was sent, at what is called ``point`` in messages."""
        training = self.begun()
        noticed = False
        try:
            self.run(training, profiler)
        except KeyboardInterrupt:
            noticed = True
        finally:
            sys.setprofile(None)
        assert noticed == profiler.sent, f"Ctrl-C at {point} is lost"
        if profiler.sent:
            self.check_modes(point)
            self.check_after_a_part(training)
            self.check_values(training, point)
        return profiler.sent

    def check_modes(self, point):
        """Handlers and modes are as they were: left half done, a switch would stay for good."""
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, f"at {point}"
        assert not signals_deferred.is_on, f"at {point}"
        torch.autocast_increment_nesting()
        assert torch.autocast_decrement_nesting() == 0, f"at {point}"

    def check_after_a_part(self, training):
        """A part of a step was made, and is no more than that."""

    def check_values(self, training, point):
        error = ""
        try:
            found = training.values()
        except OffloadError as raised:
            error = str(raised)
        if error:
            self.check_error(error, point)
            done = self.before
            training.load(self.expected[done])
        else:
            matches = [self.alike(found, each) for each in self.expected]
            before = self.before
            assert any(matches[before : before + 2]), (
                f"Neither the values before the step nor those after it, at {point}"
            )
            done = matches.index(True, before)
            self.go_on(training, self.expected[done])
        for number in range(done, STEPS):
            training.step(number)
        assert same(training.values(), self.expected[-1]), f"The run that goes on is another one, after {point}"
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, f"after {point}"
        training.optimizer.zero_grad()
        self.check_nothing_is_left(training, point)

    def alike(self, found, expected):
        """Whether these values are those of that many steps."""
        return same(found, expected)

    def go_on(self, training, expected):
        """What a user does before the training goes on from ``expected``."""

    def check_error(self, error, point):
        """Whether the training may end with this error."""
        raise AssertionError(f"at {point}: {error}")

    def check_nothing_is_left(self, training, point):
        """The training has ended."""
        raise NotImplementedError


def check_some(interrupted, count):
    """Ctrl-C at a few points of the step, and no thread or file of ours is left afterwards."""
    threads = OurThreads()
    points = interrupted.points()
    assert len(points) > 100
    # Not all points are passed in every step, for I/O takes its time.
    sent = (point for point in random.Random(0).sample(points, 4 * count) if interrupted.check(point))
    assert len(list(itertools.islice(sent, count))) == count
    end(interrupted, threads)


def check_random(interrupted, count, seed=0):
    """Ctrl-C at so many random moments of the step: none is lost, and no thread or file of ours is left."""
    chance = random.Random(seed)
    threads = OurThreads()
    training = interrupted.begun()
    begin = time.perf_counter()
    training.step(interrupted.before)
    step_s = time.perf_counter() - begin
    del training
    for number in range(count):
        delay_s = chance.uniform(0, step_s)
        assert interrupted.interrupt(Moment(delay_s), f"moment {number}, {1e3 * delay_s:.2f} ms")
    end(interrupted, threads)


def check_in_turn(interrupted, points):
    """Ctrl-C at one point after the other of the same step of one training, whose optimizer waits. How many were sent."""
    training, sent = interrupted.begun(), 0
    step, training.optimizer.step = training.optimizer.step, lambda: None
    for point in points:
        profiler, noticed = Points(point), False
        try:
            with profiler:
                training.step(interrupted.before)
        except KeyboardInterrupt:
            noticed = True
        finally:
            sys.setprofile(None)
        assert noticed == profiler.sent, f"Ctrl-C at {point} is lost"
        interrupted.check_modes(point)
        interrupted.check_after_a_part(training)
        sent += profiler.sent
    training.optimizer.step = step
    interrupted.check_values(training, "all of them")
    return sent


def check_all(interrupted):
    """Ctrl-C at every point of the step."""
    points = interrupted.points()
    assert sum(map(interrupted.check, points)) > len(points) / 2


def end(interrupted, threads):
    for _ in range(2):  # what weak references are called for leaves garbage of its own
        gc.collect()
    threads.join(TIMEOUT_S)
    assert open_files(interrupted.folder) == []


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
