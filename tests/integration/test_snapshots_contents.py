"""What a snapshot cannot hold, or does not fit what goes on from it, is noticed by its name."""

import collections
import copy

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from hf_offload import OffloadConfig, attach
from hf_offload.errors import OffloadError, SnapshotError
from hf_offload.snapshots.restoring import LINKS
from tests.faults.killed_snapshots import held_by, same, trainer_in
from tests.helpers.snapshot_loops import Stops, net, trained
from tests.helpers.snapshot_processes import end, no_process_is_left, until  # noqa: F401  a fixture
from tests.helpers.tiny_models import tiny_model


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
        ({"best": np.float64(1.5)}, "numpy"),
        ({"a": [1, {"b": (2, Own())}]}, "Own"),
        ({"last": collections.deque([1])}, "deque"),
        (np.ones(3), "numpy|Can only build"),
        ({"f": lambda: 0}, "lambda"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_at_the_first_snapshot(tmp_path, state, named):
    with pytest.raises(
        SnapshotError, match=rf"^thing\.state_dict\(\) holds what torch\.load.* does not load.*({named}).*: let"
    ):
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


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_hundreds_of_objects_are_held_and_take_few_descriptors(tmp_path, place):
    settings = {"snapshot_dir": str(tmp_path / "disk")}
    large = {"average": torch.arange(400_000.0)}
    states = [large, *({"number": number} for number in range(300))]
    with pytest.raises(Stops):
        trained(
            tmp_path / "run", 5, objects={f"n{place}": Holds(state) for place, state in enumerate(states)}, **settings
        )
    held = held_by(tmp_path / "run")
    assert len(held["snapshots"][0]["files"]) == 5  # weights, optimizer, generators, position, and the rest
    if place == "disk":
        until(lambda: (tmp_path / "disk" / "checkpoint-4").exists())
        end({held["pid"]})
        until(lambda: held_by(tmp_path / "run") is None)
    found = {f"n{place}": Holds({}) for place in range(len(states))}
    assert trained(tmp_path / "run", resume=True, objects=found, **settings)[0] == 4
    assert same(states, [each.state for each in found.values()])
    assert not (tmp_path / "run" / LINKS).exists()


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
    assert caplog.text.count("A snapshot was not taken: thing.state_dict() holds what torch.load") == 2
    assert sorted(each["step"] for each in held_by(tmp_path)["snapshots"]) == [2, 4]


def test_options_of_an_optimizer_that_cannot_be_loaded_are_an_error_at_the_first_snapshot(tmp_path):
    model = net()
    with pytest.raises(SnapshotError, match=r"optimizer\.state_dict\(\) holds what .*numpy"):
        trained(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=np.float64(0.1)))


def test_those_of_a_trainer_are_an_error_at_its_first_snapshot(tmp_path):
    trainer = trainer_in(tmp_path, True, max_steps=8)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=np.float64(0.9))
    with pytest.raises(SnapshotError, match=r"optimizer\.state_dict\(\) holds what .*numpy"):
        trainer.train()
    assert trainer.state.global_step == 4


# -- of another training ---------------------------------------------------------------------------------------------------


def trained_with(folder, optimizer=torch.optim.AdamW, stop=None, resume=False):
    model = net()
    return trained(folder, stop, resume=resume, model=model, optimizer=optimizer(model.parameters()))


def test_another_class_of_optimizer_is_refused(tmp_path):
    with pytest.raises(Stops):
        trained_with(tmp_path, stop=5)
    with pytest.raises(SnapshotError, match="is of another training: the optimizer is AdamW there and Adafactor here"):
        trained_with(tmp_path, torch.optim.Adafactor, resume=True)
    assert trained_with(tmp_path, resume=True)[0] == 4


class Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise Stops


def test_a_trainer_with_another_optimizer_is_refused(tmp_path):
    with pytest.raises(Stops):
        trainer_in(tmp_path, True, [Dies()], max_steps=8).train()
    with pytest.raises(SnapshotError, match="the optimizer is AdamW there and Adafactor here"):
        trainer_in(tmp_path, True, max_steps=8, optim="adafactor").train(resume_from_checkpoint=True)
    trainer_in(tmp_path, True, max_steps=8).train(resume_from_checkpoint=True)


def test_state_that_moves_to_a_tier_is_that_of_the_same_optimizer(tmp_path):
    with pytest.raises(Stops):
        trainer_in(tmp_path, True, [Dies()], max_steps=8).train()
    others = {"offload_optimizer": "ram", "offload_min_bytes": "0"}
    with pytest.raises(Stops):
        trainer_in(tmp_path, True, [Dies()], max_steps=8, **others).train(resume_from_checkpoint=True)
    trainer_in(tmp_path, True, max_steps=8).train(resume_from_checkpoint=True)


def test_a_model_with_another_config_is_refused_by_its_entry(tmp_path):
    def trainer(activation, callbacks=()):
        model = tiny_model("gpt2")
        config = copy.deepcopy(model.config)
        config.activation_function = activation
        return trainer_in(tmp_path, True, callbacks, model=type(model)(config), max_steps=8)

    with pytest.raises(Stops):
        trainer("gelu_new", [Dies()]).train()
    with pytest.raises(
        SnapshotError, match="activation_function of the GPT2LMHeadModel is 'gelu_new' there and 'relu'"
    ):
        trainer("relu").train(resume_from_checkpoint=True)
    assert [each["step"] for each in held_by(tmp_path)["snapshots"]] == [4]
    trainer("gelu_new").train(resume_from_checkpoint=True)


def test_a_loop_of_a_model_with_another_config_is_refused(tmp_path):
    def session_of(activation):
        model = tiny_model("gpt2")
        model.config.activation_function = activation
        return attach(model, OffloadConfig(tier="none", snapshot_steps=1)).snapshots(tmp_path, resume=True)

    with pytest.raises(Stops), session_of("gelu_new") as snapshots:
        snapshots.end_step()
        raise Stops
    with pytest.raises(SnapshotError, match=r"activation_function of the .* is 'gelu_new' there and 'relu' here"):
        session_of("relu").__enter__()


def test_the_mean_loss_of_a_training_that_went_on_is_that_of_all_its_steps(tmp_path):
    whole = trainer_in(tmp_path / "whole", False, max_steps=8, logging_steps=3).train()
    with pytest.raises(Stops):
        trainer_in(tmp_path / "run", True, [Dies()], max_steps=8, logging_steps=3).train()
    found = trainer_in(tmp_path / "run", True, max_steps=8, logging_steps=3).train(resume_from_checkpoint=True)
    assert found.training_loss == found.metrics["train_loss"] == whole.training_loss


def loader_of(rows, size):
    return torch.utils.data.DataLoader(torch.ones(rows, 4), batch_size=size)


@pytest.mark.parametrize(("rows", "size", "batches"), [(24, 3, 8), (6, 2, 3)])
def test_a_loop_with_other_batches_is_refused(tmp_path, rows, size, batches):
    with pytest.raises(Stops):
        trained(tmp_path, 5, loader=loader_of(24, 2))
    with pytest.raises(OffloadError, match=f"is of epochs of 12 batches, and this loader has {batches}: resume with"):
        trained(tmp_path, resume=True, loader=loader_of(rows, size))
