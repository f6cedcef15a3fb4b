"""What is written to the drives: counted over runs and processes, limited, and never a reason to stop training."""

import collections
import fcntl
import json
import logging
import os
import subprocess
import sys

import pytest
import torch

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, offload_activations
from hf_offload.cli.doctor import doctor
from hf_offload.integrations.summary import summary_lines
from hf_offload.storage import wear
from hf_offload.storage.buffers import empty_at_phase
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.wear import Drive, Wear, drive_of, read_wear
from tests.faults.trainers import trainer_in
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights
from tests.helpers.train import assert_same

MIB = 1 << 20
TIMEOUT_S = 60
DRIVE = Drive("made_up", "a made-up drive")


class File:
    """As much of an offload file as is counted."""

    def __init__(self, directory):
        self.directory = directory
        self.written = collections.Counter()

    @property
    def written_bytes(self):
        return self.written.total()

    @written_bytes.setter
    def written_bytes(self, nbytes):
        self.written["activations"] = nbytes


def count(directory, nbytes):
    file = File(directory)
    counted = Wear([file])
    file.written_bytes = nbytes
    counted.keep()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Counts of a made-up drive, in a folder that does not exist yet."""
    monkeypatch.setattr(wear, "drive_of", lambda directory: DRIVE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "hf_offload" / "drives"


def test_bytes_add_up_over_runs(tmp_path, folder):
    for run in range(3):
        file = File(tmp_path)
        counted = Wear([file])
        file.written_bytes = 100
        counted.keep()
        counted.keep()
        file.written_bytes = 150
        (now,) = counted.report()
        assert (now.run_bytes, now.total_bytes) == (150, 150 * (run + 1)), "what is not in the file yet counts, too"
        counted.keep()
    assert read_wear(DRIVE)[0] == 450
    (path,) = folder.iterdir()
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    state = json.loads(path.read_text())
    assert state["drive"] == DRIVE.name
    assert state["written_bytes"] == 450
    assert len(state["since"]) == len("2026-01-01")


def test_a_count_is_kept_once_a_minute_at_most(tmp_path, folder, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(wear.time, "monotonic", lambda: now[0])
    file = File(tmp_path)
    counted = Wear([file])
    file.written_bytes = 7
    for seconds, kept in ((1.0, None), (58.0, None), (2.0, 7), (1.0, 7), (60.0, 8)):
        now[0] += seconds
        counted.keep(now=False)
        assert (read_wear(DRIVE) or (None,))[0] == kept
        if kept:
            file.written_bytes = 8


def test_what_another_process_keeps_locked_is_counted_later(tmp_path, folder):
    file = File(tmp_path)
    counted = Wear([file])
    file.written_bytes = 5
    counted.keep()
    with (folder / "made_up.json").open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        file.written_bytes = 9
        counted.keep()
        assert read_wear(DRIVE)[0] == 5
        assert counted.report()[0].total_bytes == 9
    counted.keep()
    assert read_wear(DRIVE)[0] == 9


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"[]", b"[" * 600, b"9" * 600, b"\0" * 512, b"\xff" * 600, b'{"written_bytes": "many"}',
        b'{"written_bytes": 3}', b'{"written_bytes": Infinity, "since": "x"}',
    ],
)  # fmt: skip
def test_a_damaged_count_begins_anew(tmp_path, folder, damage):
    folder.mkdir(parents=True)
    (folder / "made_up.json").write_bytes(damage)
    count(tmp_path, 5)
    assert read_wear(DRIVE)[0] == 5


def test_a_link_in_place_of_a_count_is_not_followed(tmp_path, folder, caplog):
    folder.mkdir(parents=True)
    target = tmp_path / "precious"
    target.write_text("precious")
    (folder / "made_up.json").symlink_to(target)
    count(tmp_path, 5)
    assert target.read_text() == "precious"
    assert "training goes on without it" in caplog.text


COUNTING = """
import collections
import sys
from pathlib import Path
from hf_offload.storage import wear
wear.drive_of = lambda directory: wear.Drive("made_up", "a made-up drive")
class File:
    directory, written = Path("/"), collections.Counter()
file = File()
counted = wear.Wear([file])
def count():
    file.written["activations"] += 3
    counted.keep()
for times in (200, 10**9):
    print("ready", flush=True)
    if not sys.stdin.readline():
        break
    for _ in range(times):
        count()
"""


def test_processes_side_by_side_lose_nothing_and_one_that_is_killed_leaves_a_whole_count_and_no_lock(tmp_path, folder):
    command, pipes = [sys.executable, "-c", COUNTING], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(3)]

    def go(processes):
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()

    go(processes)
    killed, *others = processes
    for process in others:
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
    assert killed.stdout.readline() == "ready\n"
    together = read_wear(DRIVE)[0]
    assert together == 3 * 200 * 3
    killed.stdin.write("go\n")
    killed.stdin.flush()
    while read_wear(DRIVE)[0] < together + 30:
        assert killed.poll() is None
    killed.kill()
    killed.communicate(timeout=TIMEOUT_S)
    total = read_wear(DRIVE)[0]
    assert total % 3 == 0
    assert [path.name for path in folder.iterdir()] == ["made_up.json"]
    count(tmp_path, 1)
    assert read_wear(DRIVE)[0] == total + 1


def test_partitions_belong_to_their_drive(tmp_path, monkeypatch):
    disk = tmp_path / "sys" / "nvme7n1"
    part = disk / "nvme7n1p2"
    (part).mkdir(parents=True)
    (part / "partition").write_text("2")
    (disk / "device").mkdir()
    (disk / "device" / "model").write_text("Fast Drive 2TB   \n")
    (disk / "device" / "serial").write_text(" S123/45\n")
    devices = tmp_path / "block"
    devices.mkdir()
    number = tmp_path.stat().st_dev
    link = devices / f"{os.major(number)}:{os.minor(number)}"
    monkeypatch.setattr(wear, "file_system_of", lambda path: "ext4")
    for target in (part, disk):
        link.symlink_to(target)
        assert drive_of(tmp_path, devices) == Drive("Fast_Drive_2TB_S123_45", "Fast Drive 2TB (nvme7n1)")
        link.unlink()
    unknown = drive_of(tmp_path, devices)
    assert unknown.name == f"ext4 at {tmp_path}"
    assert "/" not in unknown.key
    monkeypatch.setattr(wear, "file_system_of", lambda path: "tmpfs")
    assert drive_of(tmp_path, devices) is None


# -- in a run --------------------------------------------------------------------------------------------------------------


def test_a_file_counts_every_byte_it_takes(tmp_path):
    tier = DiskTier(tmp_path)
    slots = [tier.reserve(MIB) for _ in range(3)]
    for slot in slots:
        tier.write(slot, empty_at_phase(MIB, 0).zero_()).result(TIMEOUT_S)
    assert tier.files[0].written_bytes == tier.stats.written_bytes == 3 * MIB
    tier.close()


def settings(tmp_path, **others):
    return OffloadConfig(tier="ssd", directory=tmp_path, min_bytes=0, **others)


def one_step(model):
    model(**tiny_batch("gpt2")).loss.backward()


def test_the_summary_says_what_of_the_drive_s_life_is_used(tmp_path, folder):
    model = tiny_model("gpt2")
    lines = []
    for rated in (None, "1MB"):
        with offload_activations(model, settings(tmp_path, drive_endurance_bytes=rated)) as session:
            one_step(model)
            session._engine.transfer._wait_for_writes(0)
            session.end_step()
            _, line = summary_lines(session)
        lines.append(line)
        total = read_wear(DRIVE)[0]
    assert lines[0].startswith("Drive a made-up drive: ")
    assert " by offloading since 20" in lines[0]
    assert "rated" not in lines[0]
    assert f"{total / 10**6:.3%} of the 976.56 KiB it is rated for" in lines[1]


def test_doctor_shows_the_count(tmp_path, folder, capsys):
    count(tmp_path, 3 * MIB)
    doctor([tmp_path], json=False, measure=False)
    assert "3.00 MiB written to it by offloading since 20" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )


LIMIT = 64 << 10  # met in the first step


def test_at_the_limit_ram_takes_over(tmp_path, folder):
    model = tiny_model("gpt2")
    with offload_activations(model, settings(tmp_path, max_disk_write_bytes=0, ram_budget="1GiB")) as session:
        one_step(model)
    assert session.stats.total.refused_bytes == 0
    assert session.stats.total.offloaded_bytes > 0


def test_at_the_limit_a_loop_stops_between_two_steps(tmp_path, folder):
    model = tiny_model("gpt2")
    config = settings(tmp_path, max_disk_write_bytes=LIMIT, on_disk_write_limit="stop")
    with offload_activations(model, config) as session:
        one_step(model)
        one_step(model)  # the same step: nothing is torn apart
        assert not session.must_stop
        session.end_step()
        assert session.must_stop
        model.eval()
        with torch.no_grad():
            model(**tiny_batch("gpt2"))
        model.train()
        with pytest.raises(OffloadError, match=r"max_disk_write_bytes=64.00 KiB.*save the model"):
            one_step(model)


def test_at_the_limit_the_trainer_saves_and_goes_on_from_there(tmp_path, folder, caplog):
    plain = {"max_steps": 4, "gradient_accumulation_steps": 2, "save_steps": 100}
    expected = trainer_in(tmp_path / "plain", False, **plain)
    expected.train()
    limit = {"offload_max_disk_write_bytes": str(LIMIT), "offload_on_disk_write_limit": "stop"}
    stopped = trainer_in(tmp_path / "ours", True, offload_optimizer="none", **plain, **limit)
    with caplog.at_level(logging.WARNING):
        stopped.train()
    assert stopped.state.global_step == 1
    assert "was reached in step 1" in caplog.text
    checkpoint = tmp_path / "ours" / "checkpoint-1"
    assert checkpoint.is_dir()
    resumed = trainer_in(tmp_path / "ours", True, offload_optimizer="none", **plain)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same(weights(resumed.model), weights(expected.model))


def test_settings_that_cannot_be_meant():
    with pytest.raises(OffloadConfigError, match="there is no limit: set max_disk_write_bytes"):
        OffloadConfig(on_disk_write_limit="stop")
    with pytest.raises(OffloadConfigError, match="drive_endurance_bytes=0 is too small"):
        OffloadConfig(drive_endurance_bytes=0)
    with pytest.raises(OffloadConfigError, match="Did you mean 'stop'"):
        OffloadConfig(on_disk_write_limit="stpo", max_disk_write_bytes=1)
