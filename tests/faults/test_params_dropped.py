"""Models that are dropped with weights on a tier, in memory or not: memory, files and threads go with them."""

import gc
import weakref

import pytest
import torch

from hf_offload.state.registry import _parked
from tests.helpers.package_threads import OurThreads
from tests.helpers.parked import parked
from tests.helpers.streamed import mlp

TIMEOUT_S = 60


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("limit_bytes", [1, 1 << 30])
def test_a_dropped_model_takes_its_tier_along(limit_bytes, backward, tmp_path):
    threads = OurThreads()
    model = mlp()
    session = parked(model, tmp_path)
    session.residency.limit_bytes = limit_bytes
    loss = model(torch.ones(2, 96)).sum()
    if backward:
        loss.backward()
    assert threads.running()
    storage, residency = session._storage, weakref.ref(session.residency)
    del model, session, loss
    gc.collect()
    assert residency() is None
    threads.join(TIMEOUT_S)
    assert storage.disk.taken_bytes == 0


def test_nothing_is_known_of_dropped_models(tmp_path):
    gc.collect()
    before = len(_parked)
    model = mlp()
    parked(model, tmp_path).residency.limit_bytes = 1 << 30
    model(torch.ones(2, 96)).sum().backward()
    assert len(_parked) > before
    del model
    gc.collect()
    assert len(_parked) == before
