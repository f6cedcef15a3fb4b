"""What a plan is known for: every tensor of every input, all forwards, what is trained, and the gradients that are there."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from hf_offload.planning.batch_shape import shape_of, tensors_in


@dataclasses.dataclass
class Pair:
    one: torch.Tensor
    other: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slots:
    one: torch.Tensor


class Holder:
    def __init__(self, tensor):
        self.tensor = tensor


def shape(*args, model=None, **kwargs):
    return shape_of(model or nn.Linear(4, 4), args, kwargs)


def long(rows=8):
    return torch.zeros(rows, 4)


NESTINGS = [
    lambda tensor: tensor,
    lambda tensor: {"features": tensor},
    lambda tensor: [tensor, torch.zeros(2)],
    lambda tensor: ({"deep": [tensor]},),
    lambda tensor: collections.OrderedDict(x=tensor),
    lambda tensor: BatchEncoding({"input_ids": tensor}),
    lambda tensor: Pair(tensor, torch.zeros(3)),
    lambda tensor: Holder(tensor),
    lambda tensor: Slots(tensor),
    lambda tensor: tensor.to_sparse(),
    lambda tensor: torch.sparse_coo_tensor([[0] * len(tensor)], tensor[:, 0], (4,)),  # not coalesced
    lambda tensor: tensor.to_sparse_csr(),
    lambda tensor: tensor.to_mkldnn(),
    lambda tensor: torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged),
]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("nest", NESTINGS)
def test_tensors_count_wherever_they_are(nest):
    large, small = (shape(nest(torch.ones(rows, 4))) for rows in (8, 2))
    assert large != small
    assert small.fits_into(large)
    assert not large.fits_into(small)
    assert large.elements > small.elements > 0
    assert list(tensors_in(nest(long())))


def test_names_count_and_switches_but_no_numbers_and_words():
    assert not shape(a=long()).fits_into(shape(b=long()))
    assert not shape(long(), output_attentions=True).fits_into(shape(long(), output_attentions=False))
    # Else every step would be another shape:
    assert shape(long(), step=1, path="1.png") == shape(long(), step=2, path="2.png")


def test_types_count():
    assert shape(long()) != shape(long().bfloat16())
    assert not shape(long().bfloat16()).fits_into(shape(long()))


@pytest.mark.parametrize(
    "made",
    [
        lambda large: shape([[1] * (8 if large else 2), [2]]),
        lambda large: shape(np.ones((8 if large else 2, 4))),
        lambda large: shape(long(), model=nn.BatchNorm1d(4, dtype=torch.float64 if large else torch.float32)),
        lambda large: shape(long(), model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(large))),
    ],
    ids=["lengths of lists", "arrays", "weights", "what is trained"],
)
def test_sizes_that_are_no_tensors_of_inputs_count(made):
    small, large = made(False), made(True)
    assert small.fits_into(large)
    assert not large.fits_into(small)


def test_autocast_counts():
    without = shape(long())
    with torch.autocast("cpu", torch.bfloat16):
        beside = shape(long())
    assert not without.fits_into(beside)
    assert not beside.fits_into(without)


def test_sparse_gradients_count():
    model = nn.Embedding(10, 4, sparse=True)
    model(torch.tensor([1, 2, 2])).sum().backward()
    assert shape(long(), model=model).gradient_bytes >= 3 * 4 * 4


def test_gradients_that_are_there_count():
    model = nn.Linear(4, 4)
    without = shape(long(), model=model)
    model(long()).sum().backward()
    beside = shape(long(), model=model)
    assert beside.gradient_bytes == 4 * (16 + 4)
    assert without.fits_into(beside)
    assert without.begins(beside)
    assert not beside.fits_into(without)


def test_further_forwards_of_a_micro_batch():
    first, both = shape(long()), shape(long()).joined(shape(long(4)))
    assert first.begins(both)
    assert first.fits_into(both)
    assert not both.fits_into(first)
    assert shape(long()).joined(shape(long(2))).fits_into(both)
    assert not shape(long()).joined(shape(long(2))).begins(both)
    assert both.elements == 4 * (8 + 4)
