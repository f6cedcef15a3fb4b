"""State dicts that are held while training goes on: loading them is what it is in memory."""

import copy

import pytest
import torch

from hf_offload.state.optimizer import streaming_of
from tests.helpers.streamed import Run, mlp, same, stream_in_parts, train

OPTIMIZERS = [
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    pytest.param(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), marks=pytest.mark.full),
    pytest.param(lambda parameters: torch.optim.Adafactor(parameters, lr=0.1), marks=pytest.mark.full),
]
PLACES = {
    "state": ("ssd", {}),
    "state in ram": ("ram", {}),
    "weights": ("ssd", {"params": "ssd"}),
    "weights in ram": ("ram", {"params": "ram"}),
}
OF = {"state": lambda model, optimizer: optimizer, "weights": lambda model, optimizer: model}


def let_all_stay(optimizer, stays=True):
    """State that was on a tier is in memory."""
    streaming = streaming_of(optimizer)
    if streaming is not None:
        streaming.let_stay(streaming.parameters() if stays else ())


def held(run, make, of, way, stays="never"):
    """A state dict is taken, training goes on, and it is loaded back. The state may stay in memory then, or for a while."""
    model = mlp()
    optimizer = run.prepare(model, make(model.parameters()))
    train(run, model, optimizer, steps=2)
    whose = of(model, optimizer)
    if way == "loaded twice":
        taken = copy.deepcopy(whose.state_dict())
        whose.load_state_dict(taken)
    elif way == "copied":
        taken = copy.deepcopy(whose.state_dict())
    else:
        taken = whose.state_dict()
    if way == "at once":
        whose.load_state_dict(taken)
    elif way == "after others":
        others = copy.deepcopy(taken)
        whose.load_state_dict(others)
        whose.load_state_dict(taken)
        del taken, others
    let_all_stay(optimizer, stays != "never")
    train(run, model, optimizer, steps=2, first=2)
    let_all_stay(optimizer, stays == "to the end")
    if way in ("held", "copied", "loaded twice"):
        whose.load_state_dict(taken)
        train(run, model, optimizer, steps=1, first=4)
    run.log_all(model, optimizer)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("way", ["held", "at once", "copied", "loaded twice", "after others"])
@pytest.mark.parametrize("stays", ["never", "to the end", "for a while"])
def test_loading_what_was_held_has_the_bits_of_the_run_in_memory(make, place, of, way, stays, tmp_path, monkeypatch):
    stream_in_parts(monkeypatch)
    optimizer, settings = PLACES[place]
    plain, streamed = Run("none", tmp_path), Run(optimizer, tmp_path, **settings)
    held(plain, make, OF[of], way)
    held(streamed, make, OF[of], way, stays)
    assert same(plain.logged, streamed.logged)


def held_and_loaded(run):
    model = mlp()
    optimizer = run.prepare(model, OPTIMIZERS[0](model.parameters()))
    train(run, model, optimizer, steps=2)
    tensors = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    optimizer.load_state_dict(optimizer.state_dict())
    train(run, model, optimizer, steps=2, first=2)
    for one in tensors:
        one.zero_()
    train(run, model, optimizer, steps=1, first=4)
    run.log_all(model, optimizer)


def test_state_that_is_held_is_the_state_after_it_was_loaded_into_itself(tmp_path):
    plain, streamed = Run("none", tmp_path), Run("ssd", tmp_path)
    held_and_loaded(plain)
    held_and_loaded(streamed)
    assert same(plain.logged, streamed.logged)
