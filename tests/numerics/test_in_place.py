"""What stands in the place of torch's operators can be followed by operations in place, as those can."""

import functools
import importlib
import pkgutil

import pytest
import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

import hf_offload
from hf_offload import RecomputeElementwiseConfig, SampledLinearConfig
from hf_offload.transforms.rematerialization.apply import Rematerialization
from hf_offload.transforms.sampling.apply import convert_linears
from tests.operators.probes import bits

WIDTH = 24
SHAPES = {"rows": (16, WIDTH), "batch": (4, 8, WIDTH)}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, hidden):
        return self.act(hidden) * hidden.cos()


def lean(switches, *make):
    def change(model):
        Rematerialization(model, RecomputeElementwiseConfig(switches)).apply()

    return lambda: nn.Sequential(*(one() for one in make)), change


def sampled(make):
    def change(model):
        convert_linears(model, SampledLinearConfig(targets="all", ratio=0.5, min_rows=1))

    return lambda: nn.Sequential(nn.Identity(), make()), change


linear = functools.partial(nn.Linear, WIDTH, WIDTH)
conv1d = functools.partial(Conv1D, WIDTH, WIDTH)
FUNCTIONS = {
    "_LinearOfPart, behind a norm": lean(("norms",), functools.partial(nn.LayerNorm, WIDTH), linear),
    "_LinearOfPart, Conv1D": lean(("norms",), functools.partial(nn.LayerNorm, WIDTH), conv1d),
    "_LinearOfPart, sampled": sampled(linear),
    "_LinearOfPart, sampled Conv1D": sampled(conv1d),
    "_Recomputed": lean(("norms",), functools.partial(LlamaRMSNorm, WIDTH)),
    "_Recomputed, of an activation": lean(("activations",), NewGELUActivation),
    "_Product": lean(("activations",), Gated),
    "_PackedDropout": lean(("dropout",), functools.partial(nn.Dropout, 0.3)),
    "_PackedReLU": lean(("activations",), nn.ReLU),
    "_CoarseActivation": lean(("derivative-8bit",), nn.GELU),
}
# Their gradients are not those of torch's operators.
ROUGH = {"_LinearOfPart, sampled", "_LinearOfPart, sampled Conv1D", "_CoarseActivation"}
# A loss is a number of its own, and what plans are counted with never runs; each has a test.
ELSEWHERE = {"_CrossEntropy", "_FourBitProduct", "_GroupedProduct", "_CtcLoss"}
FOLLOWING = {
    "ReLU": lambda result, hidden: nn.ReLU(inplace=True)(result),
    "residual": lambda result, hidden: result.add_(hidden),
    "scaled view": lambda result, hidden: result.view(-1, WIDTH).mul_(0.5).add_(1),
    "dropout": lambda result, hidden: nn.functional.dropout(result, 0.2, True, True),
    "part": lambda result, hidden: _assign(result, hidden),
}


def _assign(result, hidden):
    result[..., :4] = hidden[..., :4]
    return result


def every_function():
    found = set()
    for module in pkgutil.walk_packages(hf_offload.__path__, "hf_offload."):
        if not module.name.endswith("__main__"):
            for one in vars(importlib.import_module(module.name)).values():
                if isinstance(one, type) and issubclass(one, torch.autograd.Function) and one.__module__ == module.name:
                    found.add(one.__name__)
    return found


def test_every_function_of_the_package_is_here():
    assert {name.partition(",")[0] for name in FUNCTIONS} | ELSEWHERE == every_function()


def names_in(graph):
    waiting, found = [graph], set()
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.add(node.name())
            waiting += [next_node for next_node, _ in node.next_functions]
    return found


@pytest.mark.parametrize(("shape", "autocast"), [("rows", True), ("batch", False)])
@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operation_in_place_may_follow(name, following, shape, autocast):
    make, change = FUNCTIONS[name]

    def run(changed, in_place):
        torch.manual_seed(0)
        model = make()
        if changed:
            change(model)
        leaf = torch.randn(SHAPES[shape]).requires_grad_()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = leaf * 1
            result = model(hidden)
            if changed:
                assert f"{name.partition(',')[0]}Backward" in names_in(result.grad_fn)
            # Not all of torch's own may be written to: its ReLU saves the result.
            result = FOLLOWING[following](result if in_place else result.clone(), hidden.detach().sin())
        result.float().square().sum().backward()
        return [bits(result), bits(leaf.grad), *(bits(one.grad) for one in model.parameters())]

    assert run(True, True) == run(True, False)
    if name not in ROUGH:
        assert run(True, True) == run(False, False)
