"""What settings say of drives is what is done to them."""

import collections

import pytest
from torch import nn

from hf_offload import OffloadConfig, attach
from tests.engine.test_session import TOKENS, tiny_gpt2
from tests.helpers.package_threads import OurThreads


def train_once(model: nn.Module) -> None:
    model(TOKENS, labels=TOKENS).loss.backward()


@pytest.mark.parametrize(("given", "writing", "reading"), [({}, 2, 4), ({"io_threads": 3}, 3, 3)])
def test_each_drive_has_the_threads_that_were_asked_for(tmp_path, given, writing, reading):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    model, ours = tiny_gpt2(), OurThreads()
    session = attach(model, OffloadConfig(tier="ssd", directory=folders, min_bytes=0, **given))
    train_once(model)
    running = collections.Counter(thread.name.rpartition("-")[0] for thread in ours.running())
    session.detach()
    assert running["hf_offload-ssd-store"] == 2 * writing
    assert running["hf_offload-ssd-load"] == 2 * reading
