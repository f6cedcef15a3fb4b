"""A few architectures of transformers with everything on a tier; ``python -m tests.fuzz.architectures`` tries all of them."""

import pytest

from tests.fuzz.architectures import architectures, differences, in_memory, run
from tests.helpers.train import same

pytestmark = pytest.mark.filterwarnings("ignore")
BY_TYPE = {one[1]: one for one in architectures()}


@pytest.mark.parametrize(("model_type", "checkpointed"), [("bloom", True), ("umt5", False), ("vit_msn", True)])
def test_weights_state_and_activations_on_a_tier_leave_the_bits_of_a_training(model_type, checkpointed):
    assert differences(BY_TYPE[model_type], checkpointed, "ram", "ram") == []


def test_a_training_of_another_model_is_found_to_differ():
    config, expected = in_memory(*BY_TYPE["bloom"], False)
    config.n_layer = 1
    found = run(config, BY_TYPE["bloom"][2], BY_TYPE["bloom"][0], False, "ram")
    assert not same(expected["loss 0"], found["loss 0"])
