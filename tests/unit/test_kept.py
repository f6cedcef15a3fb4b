"""Bytes of a drive that are kept where they are: what state dicts of an accelerator's state and weights are mapped to."""

import gc

import pytest
import torch

from hf_offload.storage.disk import DiskTier
from hf_offload.storage.service import RunStorage
from hf_offload.storage.store import whole_pages

COUNT = whole_pages(1_000_000)


def random_bytes(seed):
    return torch.randint(0, 256, (COUNT,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def written(tier, content):
    slot = tier.reserve(content.numel())
    tier.write(slot, content).result()
    return slot


@pytest.fixture
def tier(tmp_path):
    tier = DiskTier(tmp_path)
    yield tier
    tier.close()


def test_what_is_kept_stays_as_long_as_anything_keeps_it(tier):
    content = random_bytes(1)
    slot = written(tier, content)
    first, second, mapped = tier.keep(slot), tier.keep(slot), tier.map(slot, private=True)
    tier.free(slot)
    others = [written(tier, random_bytes(seed)) for seed in range(2, 5)]
    del first
    gc.collect()
    others += [written(tier, random_bytes(seed)) for seed in range(5, 8)]
    assert torch.equal(mapped[:COUNT], content)
    taken = {piece for each in others for piece in each.pieces}
    assert not taken & set(slot.pieces)
    del second, mapped
    gc.collect()
    assert set(written(tier, content).pieces) == set(slot.pieces)


def test_another_tier_in_the_same_files_does_not_get_what_is_kept(tmp_path):
    storage = RunStorage()
    one, other = (DiskTier(tmp_path, storage=storage, account=name) for name in ("one", "other"))
    content = random_bytes(1)
    slot = written(one, content)
    kept, mapped = one.keep(slot), one.map(slot, private=True)
    one.close()
    others = [written(other, random_bytes(seed)) for seed in range(2, 6)]
    assert torch.equal(mapped[:COUNT], content)
    assert not {piece for each in others for piece in each.pieces} & set(slot.pieces)
    del kept, mapped
    other.close()


def test_nothing_is_kept_of_what_is_not_written(tier):
    assert tier.keep(tier.reserve(COUNT)) is None
