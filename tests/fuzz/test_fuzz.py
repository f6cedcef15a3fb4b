"""Random autograd programs, drawn and shrunk by hypothesis; ``python -m tests.fuzz`` runs as many others as asked."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.programs import DTYPES, OPERATIONS, STUMBLING, Instruction
from tests.fuzz.runs import ENDINGS, Program, check, outcomes, rig_for, some_parameters

_NUMBER = st.integers(0, 63)
_INSTRUCTION = st.builds(Instruction, st.sampled_from(OPERATIONS), _NUMBER, _NUMBER, _NUMBER)
_FORWARD = st.lists(_INSTRUCTION, min_size=1, max_size=12).map(tuple)
pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def programs(draw: st.DrawFn) -> Program:
    forwards = draw(st.lists(_FORWARD, min_size=1, max_size=3))
    return Program(
        forwards=tuple(forwards),
        endings=tuple(draw(st.sampled_from(ENDINGS)) for _ in forwards),
        reverse=draw(st.booleans()),
        threads=draw(st.integers(0, 9)) == 9,
        repeat=draw(st.booleans()),
        parameters=draw(st.booleans()),
        dtype=draw(st.integers(0, len(DTYPES) - 1)),
        outside=draw(st.booleans()),
        settled=not draw(st.booleans()),
        min_bytes=draw(st.sampled_from((0, 100))),
        read_ahead_bytes=draw(st.sampled_from((None, 0, 600))),
        room_bytes=draw(st.sampled_from((1 << 30, 1500))),
    )


@settings(max_examples=200, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_gradients_or_the_error_are_those_of_plain_autograd(program):
    assert check(program) == []


@pytest.mark.filterwarnings("ignore")  # as in check()
def test_programs_are_worth_their_name():
    """A fair share ends with gradients, most of those have loaded something, and every operation is in one of them."""
    ended, loaded, operations = 0, 0, set()
    for seed in range(200):
        program, model = Program.random(random.Random(seed)), some_parameters()
        rig = rig_for(program, model)
        found = outcomes(program, rig, model)
        if {kind for kind, _ in found} == {"done"} and any(any(gradients or ()) for _, gradients in found):
            ended += 1
            loaded += rig.stats.loaded_bytes > 0
            played = [one for one, ending in zip(program.forwards, program.endings, strict=True) if ending != "never"]
            operations |= {each.name for forward in played for each in forward}
        rig.engine.close()
    assert ended > 80
    assert loaded > ended / 2
    assert set(OPERATIONS) - operations <= STUMBLING
