"""What a snapshot cannot hold, or a resume could not load, is noticed when it is taken, by its name."""

import collections

import numpy as np
import pytest
import torch

from hf_offload.errors import SnapshotError
from tests.faults.killed_snapshots import held_by, trainer_in
from tests.helpers.snapshot_loops import Stops, net, trained
from tests.helpers.snapshot_processes import no_process_is_left  # noqa: F401  a fixture


class Holds:
    """An object whose state is this."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state() if callable(self.state) else self.state

    def load_state_dict(self, state):
        self.state = state


class Own:
    pass


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"best": np.float64(1.5)}, r"thing\.state_dict\(\)\['best'\] is a numpy\.float64"),
        ({"a": [1, {"b": (2, Own())}]}, r"thing\.state_dict\(\)\['a'\]\[1\]\['b'\]\[1\] is a tests\..*\.Own"),
        ({np.int64(3): 1}, r"thing\.state_dict\(\): its key np\.int64\(3\) is a numpy\.int64"),
        ({"last": collections.deque([1])}, r"thing\.state_dict\(\)\['last'\] is a collections\.deque"),
        (np.ones(3), r"thing\.state_dict\(\) is a numpy\.ndarray"),
        ({"f": lambda: 0}, r"thing\.state_dict\(\)\['f'\] is a builtins\.function"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_on_entering(tmp_path, state, named):
    with pytest.raises(SnapshotError, match=rf"{named}, which torch\.load\(weights_only=True\) does not load"):
        trained(tmp_path, objects={"thing": Holds(state)})


def test_what_can_be_loaded_is_held(tmp_path):
    state = {
        "set": {1}, "counter": collections.Counter("ab"), "ordered": collections.OrderedDict(a=torch.ones(2)), "none": None,
        "shape": torch.Size([2]), "kind": torch.bfloat16, 3: (True, 0.5, b"x", torch.nn.Parameter(torch.ones(1))),
    }  # fmt: skip
    with pytest.raises(Stops):
        trained(tmp_path, 4, objects={"thing": Holds(state)})
    empty = Holds({})
    assert trained(tmp_path, resume=True, objects={"thing": empty})[0] == 4
    assert repr(empty.state) == repr(state)


def test_what_cannot_be_loaded_later_is_a_warning_and_the_snapshot_before_stays(tmp_path, caplog):
    counted = Holds({"best": 0.0})

    class Turns(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            counted.count = getattr(counted, "count", 0) + 1
            if counted.count == 5:
                counted.state = {"best": np.float64(0.5)}

    model = net()
    with pytest.raises(Stops):
        trained(tmp_path, 9, model=model, optimizer=Turns(model.parameters(), lr=0.1), objects={"thing": counted})
    assert caplog.text.count("A snapshot was not taken: thing.state_dict()['best'] is a numpy.float64") == 2
    assert sorted(each["record"]["step"] for each in held_by(tmp_path)["snapshots"]) == [2, 4]


def test_options_of_an_optimizer_that_cannot_be_loaded_are_an_error_at_once(tmp_path):
    model = net()
    with pytest.raises(
        SnapshotError, match=r"optimizer\.state_dict\(\)\['param_groups'\]\[0\]\['lr'\] is a numpy\.float64"
    ):
        trained(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=np.float64(0.1)))


def test_those_of_a_trainer_are_an_error_at_its_first_snapshot(tmp_path):
    trainer = trainer_in(tmp_path, True, max_steps=8)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=np.float64(0.9))
    with pytest.raises(
        SnapshotError, match=r"optimizer\.state_dict\(\)\['param_groups'\]\[0\]\['momentum'\] is a numpy"
    ):
        trainer.train()
    assert trainer.state.global_step == 4
