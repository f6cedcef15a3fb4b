import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small only get slower when several threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
