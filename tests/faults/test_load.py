"""Much at once, and far more in all than the quota: room is used again, and every byte comes back."""

import re
import subprocess
import sys

import pytest

from hf_offload.storage.disk import DiskTier
from tests.faults.load import Load

MIB = 1 << 20
COUNT = 4


def test_sixty_four_threads_write_sixty_four_times_the_quota(tmp_path):
    quota = 8 * MIB
    tier = DiskTier(tmp_path, budget_bytes=quota, chunk_bytes=64 << 10)
    load = Load(tier, 64 * quota, 128 << 10)
    load.run(64)
    assert load.errors == []
    assert load.done_bytes >= 64 * quota
    assert tier.stats.used_bytes == 0
    assert tier.occupied_bytes <= quota
    assert tier.stats.peak_used_bytes <= quota
    tier.close()


def load_of(directory, *arguments):
    command = [sys.executable, "-m", "tests.faults.load", "--directory", str(directory), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def assert_right(process, timeout):
    said, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, said
    assert re.search(r"GB stored .* 0 errors$", said.strip()), said


def test_four_processes_share_a_directory(tmp_path):
    arguments = ["--gigabytes", "0.1", "--quota-gigabytes", "0.02", "--slot-mebibytes", "0.5", "--threads", "4"]
    processes = [load_of(tmp_path, *arguments) for _ in range(COUNT)]
    for process in processes:
        assert_right(process, 250)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.timeout(3 * 3600)
def test_a_hundred_gigabytes_go_through_a_quota_of_four(tmp_path):
    assert_right(load_of(tmp_path), 3 * 3600 - 60)
