"""Seconds that threads are busy with bytes that move, by a clock of the test."""

import threading

import pytest

from hf_offload.storage.handling import Handling


class Clock:
    """Stands still but where the test lets time pass."""

    now_s = 100.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hf_offload.storage.handling.time", clock)
    return clock


def test_a_second_counts_once_and_for_the_innermost_section(clock):
    one, other = Handling(), Handling()
    with one.of("weights"):
        clock.now_s += 1
        with one.of("waits"):
            clock.now_s += 10
            with other.of("state"):
                clock.now_s += 100
        clock.now_s += 2
    clock.now_s += 1000  # compute
    with one.of("weights"):
        clock.now_s += 4
    assert one.seconds("weights") == 7
    assert one.seconds("waits") == 10
    assert one.total_s == 17
    assert other.total_s == other.seconds("state") == 100


def test_the_section_that_runs_counts_as_far_as_it_has_come(clock):
    one, other = Handling(), Handling()
    with one.of("weights"):
        clock.now_s += 1
        assert one.total_s == 1
        with other.of("state"):
            clock.now_s += 2
            assert (one.total_s, other.total_s) == (1, 2)
    assert (one.total_s, other.total_s) == (1, 2)


def test_what_computes_in_a_section_is_not_counted(clock):
    handling = Handling()
    with handling.of("state"):
        clock.now_s += 1
        with handling.of(None):
            clock.now_s += 10
            assert handling.total_s == 1
        clock.now_s += 2
    assert handling.total_s == handling.seconds("state") == 3


def test_a_section_ends_with_an_error(clock):
    handling = Handling()
    with pytest.raises(ValueError, match="broken"), handling.of("weights"), handling.of("waits"):
        clock.now_s += 1
        raise ValueError("broken")
    clock.now_s += 10
    with handling.of("weights"):
        clock.now_s += 2
    assert handling.seconds("waits") == 1
    assert handling.seconds("weights") == 2


def test_threads_have_sections_of_their_own(clock):
    handling = Handling()

    def run():
        with handling.of("waits"):
            clock.now_s += 1

    with handling.of("weights"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert handling.seconds("waits") == handling.seconds("weights") == 1
