"""Sections in which signals wait: each is handled when the outermost one has ended, and handlers are put back in any case."""

import contextlib
import gc
import importlib
import signal
import sys
import threading
import weakref

import pytest

from hf_offload import OffloadConfig, attach, interrupts
from hf_offload.interrupts import signals_deferred
from tests.helpers.tiny_models import tiny_model

INTERRUPTS = interrupts.__file__
SET = importlib.import_module("_signal").signal
TIMEOUT_S = 60


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
