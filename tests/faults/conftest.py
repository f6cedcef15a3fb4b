import pytest


@pytest.fixture(autouse=True, scope="module")
def small_tensors(one_thread):
    """All trainings here are tiny."""
