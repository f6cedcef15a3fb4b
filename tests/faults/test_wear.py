"""What is written to the drives: counted and limited."""

import logging
import os

import pytest
import torch

from hf_offload import OffloadConfig, OffloadConfigError, OffloadError, offload_activations
from hf_offload.integrations.summary import summary_lines
from hf_offload.storage import wear
from hf_offload.storage.buffers import empty_at_phase
from hf_offload.storage.disk import DiskTier
from hf_offload.storage.wear import drive_of
from tests.faults.trainers import trainer_in
from tests.helpers.tiny_models import tiny_batch, tiny_model, weights
from tests.helpers.train import assert_same

MIB = 1 << 20
TIMEOUT_S = 60


@pytest.fixture
def made_up_drive(monkeypatch):
    monkeypatch.setattr(wear, "drive_of", lambda directory: "a made-up drive")


def test_partitions_belong_to_their_drive(tmp_path, monkeypatch):
    disk = tmp_path / "sys" / "nvme7n1"
    part = disk / "nvme7n1p2"
    (part).mkdir(parents=True)
    (part / "partition").write_text("2")
    (disk / "device").mkdir()
    (disk / "device" / "model").write_text("Fast Drive 2TB   \n")
    devices = tmp_path / "block"
    devices.mkdir()
    number = tmp_path.stat().st_dev
    link = devices / f"{os.major(number)}:{os.minor(number)}"
    monkeypatch.setattr(wear, "file_system_of", lambda path: "ext4")
    for target in (part, disk):
        link.symlink_to(target)
        assert drive_of(tmp_path, devices) == "Fast Drive 2TB (nvme7n1)"
        link.unlink()
    assert drive_of(tmp_path, devices) == f"ext4 at {tmp_path}"
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


def test_the_summary_says_what_of_the_drive_s_life_is_used(tmp_path, made_up_drive):
    model = tiny_model("gpt2")
    for rated in (None, "1MB"):
        with offload_activations(model, settings(tmp_path, drive_endurance_bytes=rated)) as session:
            one_step(model)
            session._engine.transfer._wait_for_writes(0)
            session.end_step()
            _, line = summary_lines(session)
            written = session.written()["a made-up drive"]["activations"]
        assert written == session.stats.total.written_bytes > 0
        assert line.startswith("Drive a made-up drive: ")
        assert ("rated" in line) is (rated is not None)
    assert f"{written / 10**6:.3%} of the 976.56 KiB it is rated for" in line


LIMIT = 64 << 10  # met in the first step


def test_at_the_limit_ram_takes_over(tmp_path):
    model = tiny_model("gpt2")
    with offload_activations(model, settings(tmp_path, max_disk_write_bytes=0, ram_budget="1GiB")) as session:
        one_step(model)
    assert session.stats.total.refused_bytes == 0
    assert session.stats.total.offloaded_bytes > 0


def test_at_the_limit_a_loop_stops_between_two_steps(tmp_path):
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


def test_at_the_limit_the_trainer_saves_and_goes_on_from_there(tmp_path, caplog):
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
