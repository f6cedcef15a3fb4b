import gc

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small only get slower when several threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_collections():
    """No garbage, of earlier tests for one, is collected while a signal can come.

    Much of it leaves weak sets of the standard library, threads for example: functions in Python, where an error that a
    handler raises is discarded.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as it was
