"""Architectures of transformers with everything on a tier, at tiny sizes: a few here, all of them where it is slow."""

import pytest

from tests.fuzz.architectures import UnsuitedError, architectures, differences, in_memory, run
from tests.helpers.train import same

FEW = ("bloom", "umt5", "vit_msn")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(one, id="-".join(one[:2]), marks=() if one[1] in FEW else pytest.mark.full)
        for one in architectures()
    ],
)
def test_weights_state_and_activations_on_a_tier_leave_the_bits_of_a_training(architecture, checkpointed):
    try:
        assert differences(architecture, checkpointed, "ram", "ram") == []
    except UnsuitedError as unsuited:
        pytest.skip(str(unsuited))


@pytest.mark.filterwarnings("ignore")
def test_a_training_of_another_model_is_found_to_differ():
    architecture = next(one for one in architectures() if one[1] == "bloom")
    config, expected = in_memory(*architecture, False)
    config.n_layer = 1
    found = run(config, architecture[2], architecture[0], False, "ram")
    assert not same(expected["loss 0"], found["loss 0"])
