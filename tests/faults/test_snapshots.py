"""Trainings with snapshots that are killed: every one that comes to its end has the bits of one that never stopped."""

import re
import sys

import pytest

from tests.faults.killed_snapshots import EVERY
from tests.helpers.loaded_processes import run_python

KINDS = ("trainer", "loop", "drive", "weights")


def kills(count, kind, timeout_s):
    command = [sys.executable, "-m", "tests.faults.killed_snapshots", str(count), "0", kind]
    done = run_python(command, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"^{count} kills .*, 0 problems; most steps lost: (\d+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert int(found[1]) <= EVERY


@pytest.mark.parametrize("kind", KINDS)
def test_trainings_that_are_killed_go_on_to_the_same_bits(kind):
    kills(4, kind, 200)


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_kills(kind):
    kills(200, kind, 1400)
