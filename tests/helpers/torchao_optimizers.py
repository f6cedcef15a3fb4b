"""torchao's optimizer in tests. It is not among the test's packages; where it is installed, what needs it runs."""

import contextlib
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def optimizer_of(mode: str) -> Iterator[None]:
    """What is done inside may step with the optimizer of ``mode``; skips where torchao is needed and not there.

    torchao compiles its step, which takes a C++ compiler and most of a minute, and warns of things inside of torch: here
    the same step is run as it is written.
    """
    if mode != "adamw_4bit":
        yield
        return
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        yield
