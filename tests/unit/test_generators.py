"""States of the process's generators: read, compared and put back."""

import random

import numpy as np
import pytest
import torch

from hf_offload import generators


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
@pytest.mark.parametrize("all_devices", [False, True])
def test_states_of_the_process(draw, all_devices):
    states = generators.process_states(all_devices)
    drawn = draw()
    assert not generators.are_equal(generators.process_states(all_devices), states)
    generators.set_process_states(states)
    assert draw() == drawn
