"""Much at once, and far more in all than the quota: room is used again, and every byte comes back."""

import re
import subprocess
import sys

import pytest

from hf_offload.storage.disk import DiskTier
from tests.faults.load import Load

MIB = 1 << 20


@pytest.mark.parametrize("times", [16, pytest.param(64, marks=pytest.mark.full)])
def test_sixty_four_threads_write_many_times_the_quota(tmp_path, times):
    quota = 8 * MIB
    tier = DiskTier(tmp_path, budget_bytes=quota, chunk_bytes=64 << 10)
    load = Load(tier, quota, times * quota, 128 << 10)
    load.run(64)
    assert load.errors == []
    assert load.done_bytes >= times * quota
    assert tier.stats.used_bytes == 0
    assert tier.occupied_bytes <= quota
    assert 0.9 * quota < tier.stats.peak_used_bytes <= quota
    tier.close()


def run_load(directory, *arguments, timeout):
    command = [sys.executable, "-m", "tests.faults.load", "--directory", str(directory), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_four_processes_share_a_directory(tmp_path):
    sizes = ["--gigabytes", "0.1", "--quota-gigabytes", "0.02", "--slot-mebibytes", "0.5", "--threads", "4"]
    said = run_load(tmp_path, *sizes, "--processes", "4", timeout=250)
    assert len(re.findall(r"GB stored .* 0 errors$", said, re.MULTILINE)) == 4
    assert said.endswith("4 processes, 0 of them failed, 0 files left\n")


@pytest.mark.full
@pytest.mark.timeout(3 * 3600)
def test_a_hundred_gigabytes_go_through_a_quota_of_four(tmp_path):
    assert run_load(tmp_path, timeout=3 * 3600 - 60).endswith(" 0 errors\n")
