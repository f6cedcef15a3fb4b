"""Bytes of a drive that are kept where they are: what state dicts of an accelerator's state and weights are mapped to."""

import gc

import pytest
import torch

from hf_offload.storage.disk import DiskTier
from hf_offload.storage.service import RunStorage

COUNT = 1_000_123


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
    slot = written(tier, random_bytes(1))
    first, second = tier.keep(slot), tier.keep(slot)
    tier.free(slot)
    others = [written(tier, random_bytes(seed)) for seed in range(2, 5)]
    del first
    gc.collect()
    others += [written(tier, random_bytes(seed)) for seed in range(5, 8)]
    taken = {piece for each in others for piece in each.pieces}
    assert not taken & set(slot.pieces)
    del second
    gc.collect()
    assert set(written(tier, random_bytes(8)).pieces) == set(slot.pieces)


def test_another_tier_in_the_same_files_does_not_get_what_is_kept(tmp_path):
    storage = RunStorage()
    one, other = (DiskTier(tmp_path, storage=storage, account=name) for name in ("one", "other"))
    slot = written(one, random_bytes(1))
    kept = one.keep(slot)
    one.close()
    others = [written(other, random_bytes(seed)) for seed in range(2, 6)]
    assert not {piece for each in others for piece in each.pieces} & set(slot.pieces)
    del kept
    other.close()


def test_nothing_is_kept_of_what_is_not_written(tier):
    assert tier.keep(tier.reserve(COUNT)) is None
