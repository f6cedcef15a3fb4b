"""States of generators: read, compared and put back."""

import random

import numpy as np
import pytest
import torch

from hf_offload import generators

KINDS = {
    "torch": (torch.Generator, lambda one: torch.rand((), generator=one).item()),
    "python": (random.Random, lambda one: one.random()),
    "numpy": (np.random.default_rng, lambda one: one.normal()),
    "numpy, with a counter": (lambda: np.random.Generator(np.random.Philox()), lambda one: one.normal()),
    "numpy, former": (np.random.RandomState, lambda one: one.normal()),
    "numpy, bits": (np.random.PCG64, lambda one: one.random_raw()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_whose_state_was_put_back_draws_the_same(kind):
    make, draw = KINDS[kind]
    generator = make()
    assert isinstance(generator, generators.KINDS)
    draw(generator)
    state = generators.state_of(generator)
    assert generators.are_equal(generators.state_of(generator), state)
    drawn = [draw(generator) for _ in range(3)]
    assert not generators.are_equal(generators.state_of(generator), state)
    generators.set_state(generator, state)
    assert [draw(generator) for _ in range(3)] == drawn


def test_what_draws_from_the_system_has_no_state():
    generator = random.SystemRandom()
    generators.set_state(generator, generators.state_of(generator))


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
@pytest.mark.parametrize("all_devices", [False, True])
def test_states_of_the_process(draw, all_devices):
    states = generators.process_states(all_devices)
    drawn = draw()
    assert not generators.are_equal(generators.process_states(all_devices), states)
    generators.set_process_states(states)
    assert draw() == drawn
