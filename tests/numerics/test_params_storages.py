"""What is written through storages that Python holds is in weights on a tier."""

from tests.helpers.parked import leave_memory, parked
from tests.helpers.streamed import mlp


def test_what_is_written_through_a_storage_is_kept(tmp_path):
    model = mlp()
    session = parked(model, tmp_path)
    leave_memory(session)
    model[0].weight.untyped_storage().fill_(0)
    leave_memory(session)
    assert not model[0].weight.any()


def test_a_storage_that_is_held_is_the_weights(tmp_path):
    model = mlp()
    session = parked(model, tmp_path)
    storage = model[0].weight.untyped_storage()
    model[2].weight.sum()  # others leave
    storage.fill_(0)
    del storage
    leave_memory(session)
    assert not model[0].weight.any()
