"""Ctrl-C at any point of a step: it is always noticed, leaves nothing behind, and the run that goes on has the same bits.

A step of a streamed optimizer was taken or not, or one error says that it was half.
"""

import _weakrefset
import functools
import gc
import random
import signal
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_offload import SampledLinearConfig
from hf_offload.engine.recompute import Recompute
from hf_offload.state import saved
from hf_offload.state.optimizer import streaming_of
from hf_offload.state.units import units_of
from hf_offload.structure.units import find_blocks
from tests.faults.interrupted import (
    PACKAGE,
    SIGNALS,
    Interrupted,
    check_all,
    check_in_turn,
    check_random,
    check_some,
    used_bytes,
)
from tests.faults.numbered_steps import STREAMED, Training, values_after_steps
from tests.faults.test_faulty_steps import assert_nothing_left
from tests.helpers.parked import leave_memory, parked, state_that_moves
from tests.helpers.train import same

QUICK_POINTS = 3
QUICK_MODES = 30
QUICK_SIGNALS = 8

ACTIVATIONS = {
    "ssd": {"tier": "ssd", "read_ahead_bytes": 1},
    "ram": {"tier": "ram"},
    "auto": {"tier": "auto", "memory_budget": "1MiB"},
    "sampled": {"tier": "ssd", "sampled_linear": SampledLinearConfig(ratio=0.5)},
    "lean": {"tier": "ssd", "recompute_elementwise": "exact"},
    "tiled": {"tier": "ssd", "tiled_loss": "on", "tiled_mlp": "on", "tile_bytes": "4KiB"},
    "recompute": {"tier": "ssd"},
}
STATE = {
    "lazy": {},
    "accumulated": {"backwards": 2, "clips": True},
    "in_backward": {"in_backward": True},
    "looked_at": {"looks": True},
    "loaded": {"loads": True},
}
WEIGHTS = {
    "weights": {"optimizer": "none"},
    "weights_and_state": {"optimizer": "ssd"},
    "weights_and_state_in_backward": {"optimizer": "ssd", "in_backward": True},
    "weights_evaluated": {"optimizer": "none", "evaluates": True},
}


def recompute_blocks(model):
    model.config.use_cache = False  # what fills a cache cannot run twice
    blocks = dict(find_blocks(model))
    Recompute(blocks).apply(blocks)


class Activations(Interrupted):
    """Activations are on a tier. With ``auto``, it is the first step that has the most to leave behind."""

    steps_in_memory = True

    def __init__(self, kind, folder):
        prepare = recompute_blocks if kind == "recompute" else None
        training = functools.partial(Training, make=torch.optim.SGD, prepare=prepare, min_bytes=0, **ACTIVATIONS[kind])
        self.before = 0 if kind == "auto" else 1
        changes_bits = kind in ("sampled", "tiled")
        super().__init__(training, folder, values_after_steps(training(folder)) if changes_bits else None)

    def check_after_a_part(self, training):
        gc.collect()
        torch.ones(1, requires_grad=True).sum().backward()  # autograd keeps the nodes that were next in line
        assert_nothing_left(training.session)

    def check_nothing_is_left(self, training, point):
        assert_nothing_left(training.session)
        training.session.detach()


class State(Interrupted):
    """The optimizer is on the drive."""

    def __init__(self, kind, folder):
        self.looks = STATE[kind].get("looks", False)
        super().__init__(functools.partial(Training, optimizer="ssd", **STATE[kind]), folder)

    def alike(self, found, expected):
        # What the loop changes in the state itself it may have changed in part, as in memory.
        return same(found[0], expected[0]) if self.looks else same(found, expected)

    def go_on(self, training, expected):
        if self.looks:
            training.load(expected)

    def check_error(self, error, point):
        assert "checkpoint" in error, f"at {point}: {error}"

    def check_nothing_is_left(self, training, point):
        streaming = streaming_of(training.optimizer)
        gc.collect()
        kept = sum(one.nbytes for p in streaming.parameters() for one in state_that_moves(streaming, p))
        granules = 4096 * 2 * len(streaming.records)
        assert used_bytes(streaming.state_store, kept + granules) <= kept + granules, f"after {point}"
        assert used_bytes(streaming.gradient_store, 0) == 0, f"after {point}"


class Weights(Interrupted):
    """Weights are on the drive."""

    def __init__(self, kind, folder):
        self.options = WEIGHTS[kind]
        self.steps_in_memory = self.options["optimizer"] == "none"
        super().__init__(functools.partial(Training, params="ssd", **WEIGHTS[kind]), folder)

    def check_error(self, error, point):
        assert self.options.get("in_backward"), f"at {point}: {error}"
        assert "half a step: go on from the last checkpoint" in error, f"at {point}: {error}"

    def check_nothing_is_left(self, training, point):
        saved._release(saved._in_use._units)
        gc.collect()
        residency = training.session.residency
        assert [unit.name for unit in units_of(training.model).units if unit.pin_count] == [], f"after {point}"
        leave_memory(training.session)
        granules = sum(-(-weight.nbytes // 4096) * 4096 for weight in residency.weights())
        assert used_bytes(residency.store, granules) <= granules, f"after {point}"
        if not self.steps_in_memory:
            streaming = streaming_of(training.optimizer)
            assert used_bytes(streaming.gradient_store, 0) == 0, f"after {point}"


KINDS = dict.fromkeys(ACTIVATIONS, Activations) | dict.fromkeys(STATE, State) | dict.fromkeys(WEIGHTS, Weights)


@pytest.fixture
def interrupted(kind, tmp_path, no_collections, machine_with_drive):
    machine_with_drive(1e9)
    return KINDS[kind](kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_at_a_point_of_a_step_is_noticed_and_loses_nothing(interrupted):
    check_some(interrupted, QUICK_POINTS)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_at_every_point_of_a_step_is_noticed_and_loses_nothing(interrupted):
    check_all(interrupted)


@pytest.mark.parametrize("kind", ["ssd"])
def test_ctrl_c_at_random_moments(interrupted):
    check_random(interrupted, QUICK_SIGNALS)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "weights_evaluated"]
)  # evaluation's own loop has modes
def test_two_hundred_ctrl_cs_at_random_moments(interrupted):
    check_random(interrupted, SIGNALS)


# -- of activations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "sampled", "lean", "tiled", "recompute"])
def test_ctrl_c_while_a_mode_is_switched_is_noticed_and_leaves_nothing(kind, interrupted):
    """Python code of PyTorch's switches gradients, autocast and hooks: left half done, they stay switched for good."""
    switches = {"grad_mode.py", "autocast_mode.py", "_python_dispatch.py", "graph.py", "overrides.py"}
    points = [
        point
        for point in interrupted.points()
        if point[1] in ("__init__", "__enter__", "__exit__") and Path(point[0]).name in switches
    ]
    of_autocast = [point for point in points if Path(point[0]).name == "autocast_mode.py"]
    assert len(points) > 5
    assert of_autocast or kind == "auto"
    some = random.Random(0).sample(points, min(len(points), QUICK_MODES))
    some += random.Random(0).sample(of_autocast, min(len(of_autocast), 2 * QUICK_MODES))
    assert check_in_turn(interrupted, some) > 0


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_no_function_of_the_package_runs_in_python_while_a_graph_goes(interrupted):
    """Python discards what is raised there, Ctrl-C included."""
    training = interrupted.begun()
    loss = training.model(**training.batch).loss
    training.session.settle()
    called = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(note)
    del loss
    sys.setprofile(None)
    assert called == []
    interrupted.check_after_a_part(training)
    training.session.end_step()
    interrupted.check_values(training, "the end of a graph")


# -- of state and weights --------------------------------------------------------------------------------------------------


def test_ctrl_c_while_optimizers_are_looked_through_keeps_none_that_has_gone(tmp_path):
    training = Training(tmp_path, **STREAMED)
    training.step(0)
    sent = []

    def send(frame, event, _):
        if event == "call" and frame.f_code.co_name == "__exit__" and frame.f_code.co_filename == _weakrefset.__file__:
            sys.setprofile(None)
            sent.append(frame.f_lineno)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(send)
    try:
        with pytest.raises(KeyboardInterrupt):
            training.session.clip_grad_norm_(1.0)
    finally:
        sys.setprofile(None)
    assert len(sent) == 1
    gone = weakref.ref(streaming_of(training.optimizer))
    training.session.detach()
    del training
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["weights_and_state"])
@pytest.mark.parametrize(
    "entry", ["saved.py pack", "saved.py unpack", "units.py using", "step.py arrived", "step.py step"]
)
def test_ctrl_c_where_pytorch_calls_the_package_loses_no_weight(entry, interrupted):
    file, function = entry.split()
    points = [each for each in interrupted.points() if each[0].endswith(f"/state/{file}") and each[1] == function]
    assert any(interrupted.check(point) for point in (points[0], points[-1]))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_array_that_is_made_after_ctrl_c_has_the_weight(phase, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)])
    parked(model, tmp_path)
    inputs = torch.ones(2, 64)
    model(inputs).sum().backward()

    def interrupt(*_):
        raise KeyboardInterrupt

    for layer in model:
        if phase == "forward":
            handle = model[3].register_forward_hook(interrupt)
        else:
            handle = model[2].register_full_backward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(inputs).sum().backward()
        handle.remove()
        array = layer.weight.detach().numpy()
        expected = array.copy() + 1
        with torch.no_grad():
            layer.weight.add_(1)
        for each in model:  # weights come, and let others leave
            each(inputs)
        assert (array == expected).all()
        model(inputs)  # leaves what the interrupted one has entered
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
