"""Much at once, and far more in all than the quota: room is used again, and every byte comes back."""

from hf_offload.storage.disk import DiskTier
from tests.faults.load import MIB, Load


def test_sixty_four_threads_write_many_times_the_quota(tmp_path):
    times, quota = 16, 4 * MIB
    tier = DiskTier(tmp_path, budget_bytes=quota, chunk_bytes=64 << 10)
    load = Load(tier, quota, times * quota, 128 << 10)
    load.run(64)
    assert load.errors == []
    assert load.done_bytes >= times * quota
    assert tier.stats.used_bytes == 0
    assert tier.occupied_bytes <= quota
    assert 0.9 * quota < tier.stats.peak_used_bytes <= quota
    tier.close()
