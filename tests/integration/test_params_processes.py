"""Models with weights on a tier in other processes: workers of a DataLoader that hold one, and processes that get one."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers.loaded_processes import START_METHOD, load
from tests.helpers.parked import leave_memory, parked
from tests.helpers.train import batch, mlp


class Answers(Dataset):
    """Rows that a model computes."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> torch.Tensor:
        torch.set_num_threads(1)
        with torch.no_grad():
            return self.model(batch(number))


def _answers(model, context):
    loader = DataLoader(Answers(model), num_workers=1, multiprocessing_context=context, timeout=100)
    return list(loader)


def _double(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("place", ["ssd", "ram"])
def test_a_worker_that_was_forked_reads_weights_where_they_are(place, tmp_path):
    model = mlp()
    expected = [model(batch(number)).detach() for number in range(2)]
    session = parked(model, tmp_path if place == "ssd" else None, place)
    leave_memory(session)
    found = _answers(model, "fork")
    assert all(torch.equal(one, other[0]) for one, other in zip(expected, found, strict=True))
    assert torch.equal(model(batch(0)), expected[0])


def test_workers_and_processes_that_are_given_the_model_have_its_weights(tmp_path):
    load()
    model = mlp()
    expected = [model(batch(number)).detach() for number in range(2)]
    session = parked(model, tmp_path)
    leave_memory(session)
    found = _answers(model, START_METHOD)
    assert all(torch.equal(one, other[0]) for one, other in zip(expected, found, strict=True))
    # What was sent is memory that both processes have, as without a tier.
    process = torch.multiprocessing.get_context(START_METHOD).Process(target=_double, args=(model,))
    process.start()
    process.join()
    assert process.exitcode == 0
    right = mlp()
    _double(right)
    assert torch.equal(model(batch(0)), right(batch(0)))
