"""Random numbers for tests whose own module has no generator."""

import random

import numpy

GENERATOR = random.Random(0)
NUMPYS = numpy.random.default_rng(0)
_START = NUMPYS.bit_generator.state


def draw():
    return float(NUMPYS.uniform(0.9, 1.1))


def reset():
    GENERATOR.seed(0)
    NUMPYS.bit_generator.state = _START
