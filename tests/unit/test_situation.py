"""What a plan is known for: every tensor of every input, all forwards, what is trained, and the gradients that are there."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from hf_offload.planning.situation import situation_of, tensors_in


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


def situation(*args, model=None, **kwargs):
    return situation_of(model or nn.Linear(4, 4), args, kwargs)


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
    large, small = (situation(nest(torch.ones(rows, 4))) for rows in (8, 2))
    assert large != small
    assert small.fits_into(large)
    assert not large.fits_into(small)
    assert large.elements > small.elements > 0
    assert list(tensors_in(nest(long())))


def test_names_count_and_switches_but_no_numbers_and_words():
    assert not situation(a=long()).fits_into(situation(b=long()))
    assert not situation(long(), output_attentions=True).fits_into(situation(long(), output_attentions=False))
    # Else every step would be another situation:
    assert situation(long(), step=1, path="1.png") == situation(long(), step=2, path="2.png")


def test_types_count():
    assert situation(long()) != situation(long().bfloat16())
    assert not situation(long().bfloat16()).fits_into(situation(long()))


def test_lengths_of_lists_count():
    large, small = (situation([[1] * rows, [2]]) for rows in (8, 2))
    assert small.fits_into(large)
    assert not large.fits_into(small)


def test_autocast_counts():
    without = situation(long())
    with torch.autocast("cpu", torch.bfloat16):
        beside = situation(long())
    assert not without.fits_into(beside)
    assert not beside.fits_into(without)


def test_larger_weights_count():
    model = nn.BatchNorm1d(4)
    small = situation(long(), model=model)
    large = situation(long(), model=model.double())
    assert small.fits_into(large)
    assert not large.fits_into(small)


def test_arrays_count():
    large, small = (situation(np.ones((rows, 4))) for rows in (8, 2))
    assert small.fits_into(large)
    assert not large.fits_into(small)


def test_sparse_gradients_count():
    model = nn.Embedding(10, 4, sparse=True)
    model(torch.tensor([1, 2, 2])).sum().backward()
    assert situation(long(), model=model).gradient_bytes >= 3 * 4 * 4


def test_what_is_trained_counts():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    all_of_it = situation(long(), model=model)
    model[0].requires_grad_(False)
    half = situation(long(), model=model)
    assert half.fits_into(all_of_it)
    assert not all_of_it.fits_into(half)


def test_gradients_that_are_there_count():
    model = nn.Linear(4, 4)
    without = situation(long(), model=model)
    model(long()).sum().backward()
    beside = situation(long(), model=model)
    assert beside.gradient_bytes == 4 * (16 + 4)
    assert without.fits_into(beside)
    assert without.begins(beside)
    assert not beside.fits_into(without)


def test_further_forwards_of_a_micro_batch():
    first, both = situation(long()), situation(long()).joined(situation(long(4)))
    assert first.begins(both)
    assert first.fits_into(both)
    assert not both.fits_into(first)
    assert situation(long()).joined(situation(long(2))).fits_into(both)
    assert not situation(long()).joined(situation(long(2))).begins(both)
    assert both.elements == 4 * (8 + 4)
