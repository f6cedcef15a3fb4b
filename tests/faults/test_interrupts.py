"""Ctrl-C at any point of a step: it is always noticed, leaves nothing behind, and changes no later step.

Python runs a signal's handler where it calls a function or returns from one of C. Both are events of a profiler, so that a
signal can be sent at every such point of the package, one after the other.
"""

import contextlib
import gc
import importlib
import itertools
import logging
import random
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

import hf_offload
from hf_offload import OffloadConfig, SampledLinearConfig, attach, interrupts
from hf_offload.engine.recompute import Recompute
from hf_offload.interrupts import signals_deferred
from hf_offload.storage.tier import Tier
from hf_offload.structure.units import find_blocks
from tests.faults.failing_calls import Hang
from tests.faults.test_dropped_models import held_files
from tests.faults.test_faulty_steps import assert_nothing_left
from tests.helpers.package_threads import OurThreads
from tests.helpers.tiny_models import gradients, tiny_batch, tiny_model

logger = logging.getLogger(__name__)

PACKAGE = str(Path(hf_offload.__file__).parent)
INTERRUPTS = interrupts.__file__
SET = importlib.import_module("_signal").signal
TIMEOUT_S = 60
QUICK_POINTS = 6
QUICK_MODES = 24
QUICK_SIGNALS = 12
SIGNALS = 200

SETTINGS = {
    "ssd": {"tier": "ssd", "read_ahead_bytes": 1},
    "ram": {"tier": "ram"},
    "auto": {"tier": "auto", "memory_budget": "1MiB"},
    "sampled": {"tier": "ssd", "sampled_linear": SampledLinearConfig(ratio=0.5)},
    "lean": {"tier": "ssd", "recompute_elementwise": "exact"},
    "tiled": {"tier": "ssd", "tiled_loss": "on", "tiled_mlp": "on", "tile_bytes": "4KiB"},
    "recompute": {"tier": "ssd"},
}


class Run:
    """Steps of a tiny model, each of which gives the same gradients unless it is interrupted."""

    def __init__(self, folder, kind):
        self.kind = kind
        self.model = tiny_model("gpt2")
        self.batch = tiny_batch("gpt2")
        changes_bits = kind in ("sampled", "tiled")
        if not changes_bits:
            self.expected = self._gradients()
        where = {} if kind == "ram" else {"directory": folder}
        self._config = OffloadConfig(min_bytes=0, **where, **SETTINGS[kind])
        self._measures = kind == "auto"
        if kind == "recompute":
            self.model.config.use_cache = False  # what fills a cache cannot run twice
            blocks = dict(find_blocks(self.model))
            Recompute(blocks).apply(blocks)
        self.session = attach(self.model, self._config)
        if changes_bits:
            self.expected = self.step()

    def begin(self):
        """Before what is to be interrupted: with ``auto``, it is the first step that has the most to leave behind."""
        if self._measures:
            self.session.detach()
            self.session = attach(self.model, self._config)

    def _gradients(self):
        self.model.zero_grad()
        torch.manual_seed(5)
        self.model(**self.batch).loss.backward()
        return gradients(self.model)

    def step(self):
        found = self._gradients()
        self.session.end_step()
        return found

    def check(self):
        """Nothing of an interrupted step is left, and the next one is right."""
        gc.collect()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not signals_deferred.is_on
        torch.autocast_increment_nesting()
        assert torch.autocast_decrement_nesting() == 0  # or casts of weights would stay for good
        torch.ones(1, requires_grad=True).sum().backward()  # autograd keeps the nodes that were next in line
        assert_nothing_left(self.session)
        found = self.step()
        assert found.keys() == self.expected.keys()
        assert all(torch.equal(self.expected[name], found[name]) for name in found)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    def end(self):
        """Nothing is left of the session."""
        self.session.detach()
        assert _get_current_dispatch_mode() is None


@pytest.fixture(params=list(SETTINGS))
def run(request, tmp_path, no_collections):
    threads = OurThreads()
    run = Run(tmp_path, request.param)
    yield run
    run.end()
    threads.join(TIMEOUT_S)
    assert held_files(tmp_path) == []


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


def points_of(run):
    """All of them, in two steps."""
    points = Points()
    run.begin()
    with points:
        run.step()
        run.step()
    return list(points.seen)


def interrupt_at(run, points):
    """How many of the signals were sent: not all points are passed in every step, for I/O takes its time."""
    sent = 0
    for point in points:
        profiler, noticed = Points(point), False
        run.begin()
        try:
            with profiler:
                run.step()
                run.step()
        except KeyboardInterrupt:
            noticed = True
        sys.setprofile(None)
        assert noticed == profiler.sent, f"Ctrl-C at {point} is lost"
        sent += profiler.sent
        run.check()
    return sent


def test_ctrl_c_at_a_point_of_a_step_is_noticed_and_leaves_nothing(run):
    points = points_of(run)
    assert len(points) > 100
    some = (point for point in random.Random(0).sample(points, 4 * QUICK_POINTS) if interrupt_at(run, [point]))
    assert len(list(itertools.islice(some, QUICK_POINTS))) == QUICK_POINTS


@pytest.mark.parametrize("run", ["auto", "sampled", "lean", "tiled", "recompute"], indirect=True)
def test_ctrl_c_while_a_mode_is_switched_is_noticed_and_leaves_nothing(run):
    """Python code of PyTorch's switches gradients, autocast and hooks: left half done, they stay switched for good."""
    switches = {"grad_mode.py", "autocast_mode.py", "_python_dispatch.py", "graph.py", "overrides.py"}
    points = [
        point
        for point in points_of(run)
        if point[1] in ("__init__", "__enter__", "__exit__") and Path(point[0]).name in switches
    ]
    of_autocast = [point for point in points if Path(point[0]).name == "autocast_mode.py"]
    assert len(points) > 5
    assert of_autocast or run.kind == "auto"
    assert interrupt_at(run, random.Random(0).sample(points, min(len(points), QUICK_MODES))) > 0
    interrupt_at(run, random.Random(0).sample(of_autocast, min(len(of_autocast), QUICK_MODES)))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_ctrl_c_at_every_point_of_a_step_is_noticed_and_leaves_nothing(run):
    points = points_of(run)
    assert interrupt_at(run, points) > len(points) / 2


def test_no_function_of_the_package_runs_in_python_while_a_graph_goes(run):
    """Python discards what is raised there, Ctrl-C included."""
    run.begin()
    torch.manual_seed(5)
    loss = run.model(**run.batch).loss
    if run.session._engine is not None:
        run.session._engine.transfer._wait_for_writes(0)
    called = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(note)
    del loss
    sys.setprofile(None)
    assert called == []
    run.session.end_step()
    run.check()


def random_interrupts(run, count, seed):
    chance = random.Random(seed)
    begin = time.perf_counter()
    run.step()
    step_s = time.perf_counter() - begin
    main, latest_s = threading.get_ident(), 0.0
    for number in range(count):
        sent, times = threading.Event(), []

        delay_s = chance.uniform(0, 2 * step_s)

        def send(sent=sent, times=times, delay_s=delay_s):
            time.sleep(delay_s)
            times.append(time.perf_counter())
            signal.pthread_kill(main, signal.SIGINT)
            sent.set()

        sender = threading.Thread(target=send)
        run.begin()
        try:
            sender.start()
            while not sent.is_set():
                run.step()
        except KeyboardInterrupt:
            times.append(time.perf_counter())
        sender.join()
        assert len(times) == 2, f"signal {number} is lost"
        latest_s = max(latest_s, times[1] - times[0])
        run.check()
    found = run.kind, count, 1e3 * latest_s, 1e3 * step_s
    logger.info("%s: %d signals, each noticed within %.0f ms; a step takes %.0f ms.", *found)


@pytest.mark.parametrize("run", ["ssd"], indirect=True)
def test_ctrl_c_at_random_moments(run):
    random_interrupts(run, QUICK_SIGNALS, seed=1)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_two_hundred_ctrl_cs_at_random_moments(run):
    random_interrupts(run, SIGNALS, seed=2)


# -- sections without handlers ---------------------------------------------------------------------------------------------


@pytest.fixture
def raising():
    """Handlers that raise an error of their own for two other signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGALRM)}

    def handler(number, frame):
        raise InterruptedError(number)

    for number in before:
        signal.signal(number, handler)
    yield handler
    for number, old in before.items():
        signal.signal(number, old)


def in_sections(inner, outer):
    with signals_deferred:
        with signals_deferred:
            inner()
        outer()


def in_entry_points(inner, outer):
    deferred = signals_deferred(inner)

    def both():
        deferred()
        outer()

    signals_deferred(both)()


@pytest.mark.parametrize("nested", [in_sections, in_entry_points])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGALRM])
def test_a_signal_waits_for_the_end_of_the_outermost_section(raising, number, nested):
    handlers = signal.getsignal(number)
    reached = []

    def inner():
        signal.raise_signal(number)
        signal.raise_signal(number)
        reached.append("inner")

    with pytest.raises((KeyboardInterrupt, InterruptedError)):
        nested(inner, lambda: reached.append("outer"))
        reached.append("after")
    assert reached == ["inner", "outer"]
    assert signal.getsignal(number) is handlers
    with signals_deferred:
        pass  # it came once


def test_an_entry_point_gives_what_its_function_gives_and_ends_with_its_error():
    @signals_deferred
    def halved(number, *, by=2):
        assert signals_deferred.is_on
        return number / by

    assert halved.__name__ == "halved"
    assert halved(6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        halved(6, by=0)
    assert not signals_deferred.is_on
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_signal_that_came_in_a_section_is_handled(raising):
    came = []
    signal.signal(signal.SIGALRM, lambda number, frame: came.append((number, frame is not None)))
    with pytest.raises(InterruptedError) as raised, signals_deferred:
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGUSR1)
    assert raised.value.args == (signal.SIGUSR1,)
    assert came == [(signal.SIGALRM, True)]


def test_a_section_can_be_left_where_it_waits_and_stays_a_section_until_then(raising):
    reached = []
    with pytest.raises(KeyboardInterrupt), signals_deferred:
        try:
            signal.raise_signal(signal.SIGINT)
            signals_deferred.deliver()
        finally:
            signal.raise_signal(signal.SIGINT)
            reached.append("cleaned up")
    assert reached == ["cleaned up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_handler_sets_where_a_section_waits_stays_set():
    """The first Ctrl-C is asked for, the second is to end the process."""
    before = signal.signal(signal.SIGUSR2, lambda number, _: signal.signal(number, signal.SIG_IGN))
    try:
        with signals_deferred:
            signal.raise_signal(signal.SIGUSR2)
            signals_deferred.deliver()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_handler_that_runs_where_a_section_waits_has_sections_of_its_own(raising):
    reached = []

    def save(number, frame):
        with signals_deferred:
            signal.raise_signal(signal.SIGINT)
            reached.append("saved")

    signal.signal(signal.SIGUSR1, save)
    with pytest.raises(KeyboardInterrupt), signals_deferred:
        signal.raise_signal(signal.SIGUSR1)
        signals_deferred.deliver()
    assert reached == ["saved"]
    assert not signals_deferred.is_on


class Instructions:
    """Calls ``act`` before each instruction with which a section begins and ends."""

    def __init__(self, act):
        self._act = act
        self.passed = 0

    def __enter__(self):
        sys.settrace(self._event)

    def __exit__(self, *_):
        sys.settrace(None)

    def _event(self, frame, event, _):
        if frame.f_code.co_filename != INTERRUPTS:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.passed += 1
            self._act(self.passed)
        return self._event


def handlers():
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGALRM)}


def test_sections_in_the_middle_of_the_beginning_and_the_end_of_another(raising):
    """As of a finalizer that the garbage collector runs there: no signal is kept from its handler, then or later."""
    before, inside, ran_inside = handlers(), [], []
    signal.signal(signal.SIGUSR2, lambda number, _: ran_inside.append(bool(inside)))

    def finalizer(number):
        inside.append(number)
        with signals_deferred:
            pass
        inside.clear()

    instructions = Instructions(finalizer)
    try:
        with instructions, signals_deferred:
            signal.raise_signal(signal.SIGUSR2)
        assert instructions.passed > 50
        assert handlers() == before
        assert ran_inside == [False]
        with pytest.raises(KeyboardInterrupt), signals_deferred:
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_model_that_goes_in_the_middle_of_a_section():
    """It is garbage with its session, whose hooks leave this thread in a section."""
    gone = []
    for point in range(10, 200, 20):
        gc.disable()  # what is young is found at once
        model = tiny_model("gpt2")
        session = attach(model, OffloadConfig(tier="ram"))
        weakref.finalize(model, gone.append, point)
        model.__dict__["itself"] = model
        del model
        instructions = Instructions(lambda passed, point=point: gc.collect(0) if passed == point else None)
        with instructions, signals_deferred:
            pass
        gc.enable()
        session.detach()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, point
        if instructions.passed < point:
            break
        assert gone[-1] == point
    assert len(gone) > 3


def test_handlers_are_put_back_wherever_two_of_them_raise(raising):
    """One of a signal that comes while they are put back, and one while that is mended."""
    before = handlers()
    instructions = Instructions(lambda passed: None)
    with instructions, signals_deferred:
        pass
    assert instructions.passed > 50
    for point in range(1, instructions.passed + 1):
        sent = []

        def send(number, point=point, sent=sent):
            if number == point:
                sent.append(number)
                signal.raise_signal(signal.SIGALRM)

        def send_again(frame, event, called, sent=sent):
            if event == "c_call" and called is SET and len(sent) == 1:
                sent.append("again")
                signal.raise_signal(signal.SIGALRM)

        with contextlib.suppress(InterruptedError), Instructions(send):
            sys.setprofile(send_again)
            with signals_deferred:
                pass
        sys.setprofile(None)
        assert handlers() == before, point
        assert not signals_deferred.is_on


@pytest.mark.parametrize("section", [lambda: None, signals_deferred(lambda: None)], ids=["section", "entry_point"])
def test_handlers_are_put_back_at_the_limit_of_recursion(section, raising):
    before = handlers()

    def recur():
        with signals_deferred:
            section()
        section()
        recur()

    with pytest.raises(RecursionError):
        recur()
    assert handlers() == before
    assert not signals_deferred.is_on


def test_signals_without_a_handler_are_left_alone():
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with signals_deferred:
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_section_of_another_thread_defers_nothing():
    inside, leave = threading.Event(), threading.Event()

    @signals_deferred
    def wait():
        inside.set()
        leave.wait(TIMEOUT_S)

    def work():
        with signals_deferred:
            wait()

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(TIMEOUT_S)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    leave.set()
    thread.join()


def test_ctrl_c_while_the_engine_waits_for_a_drive_does_not_wait_for_it(tmp_path, monkeypatch):
    """The drive answers only when the step has been left."""
    run = Run(tmp_path, "ssd")
    hang = Hang(monkeypatch, "read_once")
    monkeypatch.setattr(Tier, "stall_limit_s", TIMEOUT_S)  # Ctrl-C comes before patience ends
    main = threading.get_ident()

    def send():
        assert hang.inside.wait(TIMEOUT_S)
        signal.pthread_kill(main, signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        run.step()
    sender.join()
    hang.end()
    run.check()
    run.end()
