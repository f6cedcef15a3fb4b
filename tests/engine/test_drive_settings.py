"""What settings say of drives is what is done to them."""

import collections

import pytest
import torch
from torch import nn

from hf_offload import OffloadConfig, attach
from hf_offload.engine.ring import PinnedRing
from hf_offload.storage.disk_io import DataFile
from tests.engine.test_session import TOKENS, tiny_gpt2
from tests.helpers.package_threads import OurThreads
from tests.helpers.simulated_device import SimulatedDevice


@pytest.mark.parametrize(("given", "writing", "reading"), [({}, 2, 4), ({"io_threads": 3}, 3, 3)])
def test_each_drive_has_the_threads_that_were_asked_for(tmp_path, given, writing, reading):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    model, ours = tiny_gpt2(), OurThreads()
    session = attach(model, OffloadConfig(tier="ssd", directory=folders, min_bytes=0, **given))
    loss = model(TOKENS, labels=TOKENS).loss
    session.settle()  # on a busy machine nothing would be loaded otherwise, and threads begin with the first load
    loss.backward()
    running = collections.Counter(thread.name.rpartition("-")[0] for thread in ours.running())
    session.detach()
    assert running["hf_offload-ssd-store"] == 2 * writing
    assert running["hf_offload-ssd-load"] == 2 * reading


@pytest.mark.parametrize("chunk_bytes", [64 << 10, 256 << 10])
def test_calls_to_drives_are_as_large_as_was_asked_for(tmp_path, monkeypatch, chunk_bytes):
    calls = {"write": set(), "read": set()}
    for kind, sizes in calls.items():
        usual = getattr(DataFile, kind)

        def spying(file, data, *others, usual=usual, sizes=sizes):
            sizes.add(len(data))
            return usual(file, data, *others)

        monkeypatch.setattr(DataFile, kind, spying)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
    config = OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0, io_chunk_bytes=chunk_bytes)
    session = attach(model, config)
    loss = model(torch.randn(512, 512)).sum()
    session.settle()
    loss.backward()
    session.detach()
    assert max(calls["write"]) == max(calls["read"]) == chunk_bytes


@pytest.mark.parametrize("size_bytes", [1 << 20, 3 << 20])
def test_the_ring_is_as_large_as_was_asked_for(tmp_path, monkeypatch, size_bytes):
    usual, made = PinnedRing.__init__, []

    def spying(ring, capacity_bytes, pinned):
        made.append(capacity_bytes)
        usual(ring, capacity_bytes, False)  # pinned memory needs a driver

    monkeypatch.setattr(PinnedRing, "__init__", spying)
    monkeypatch.setattr("hf_offload.session.open_device", lambda device: SimulatedDevice(0))
    session = attach(tiny_gpt2(), OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0, ring_bytes=size_bytes))
    session.detach()
    assert made == [size_bytes]
