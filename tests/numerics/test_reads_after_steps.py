"""Reads of weights that no tensor subclass is asked about, after steps in a loop of the user."""

import numpy
import pytest
import torch
from torch import nn

from tests.helpers.streamed import Run, mlp, same

READS = {
    "torch.tensor": lambda model: torch.tensor(model[0].weight),
    "torch.Tensor": lambda model: torch.Tensor(model[0].weight),
    "Tensor.new_tensor": lambda model: torch.zeros(1).new_tensor(model[0].weight),
    "Tensor.set_": lambda model: torch.empty(0).set_(model[0].weight).clone(),
    "Tensor.as_subclass": lambda model: model[0].weight.as_subclass(Named).sum().as_subclass(torch.Tensor),
    "numpy.asarray": lambda model: torch.from_numpy(numpy.asarray(model[0].weight.detach()).copy()),
    "torch.nested": lambda model: torch.nested.nested_tensor([model[0].weight]).to_padded_tensor(0.0),
    "torch.func.grad": lambda model: torch.func.grad(lambda weight: weight.square().sum())(model[0].weight),
    "torch.func.vmap": lambda model: torch.func.vmap(lambda row: row * 2)(model[0].weight),
    "torch.jit.trace": lambda model: model.traced[0](torch.ones(1, 96)),
    "a dispatch below classes": lambda model: below_classes(model[0].weight),
}


class Named(torch.Tensor):
    """A subclass of a user."""


def below_classes(weight):
    with torch._C.DisableTorchFunction():
        return weight.sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("params", ["none", "ram", "ssd"])
def test_a_read_after_a_step_sees_it_whatever_dispatches_it(params, tmp_path):
    found = []
    for place in ("none", "ssd"):
        model = mlp()
        model.traced = [
            torch.jit.trace(nn.Sequential(*model), torch.ones(1, 96))
        ]  # in a list, it is none of its modules
        run = Run(place, tmp_path, defers=False, params=params if place == "ssd" else "none")
        optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        if run.session is not None and run.session.residency is not None:
            run.session.residency.limit_bytes = 1
        for read in READS.values():
            model(torch.ones(2, 96)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                run.log(read(model))
        found.append(run.logged)
    different = [name for name, one, other in zip(READS, *found, strict=True) if not same(one, other)]
    assert not different
