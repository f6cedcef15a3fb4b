"""``hf-offload doctor --check``: it passes where everything works, and says what does not where it does not."""

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_offload.cli.main import app
from hf_offload.engine.transfer import Transfer
from hf_offload.reports import self_test
from hf_offload.storage.disk import DiskTier


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(self_test, "_SIZES", (1, 4097, 70_003))
    monkeypatch.setattr(self_test, "_WIDTH", 32)


def check(folder, *options):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", "--check", "-d", str(folder), *options])


def test_everything_works_here(tmp_path, caplog):
    before = torch.are_deterministic_algorithms_enabled()
    state = torch.get_rng_state()
    result = check(tmp_path)
    assert result.exit_code == 0, result.output
    assert "Everything works on this device." in result.stdout
    assert "failed" not in result.stdout
    assert result.stdout.count("passed") == 4
    assert caplog.text == ""  # that RAM is moved to RAM, on purpose, is no warning
    assert torch.are_deterministic_algorithms_enabled() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_changed_bytes_are_found(tmp_path, monkeypatch):
    read = DiskTier.read

    def read_wrong(tier, slot, into, urgent=False):
        future = read(tier, slot, into, urgent)
        future.result()
        into[-1] ^= 1
        return future

    monkeypatch.setattr(DiskTier, "read", read_wrong)
    result = check(tmp_path, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["passed"]
    failed = {one["name"]: one["detail"] for one in found["checks"] if not one["passed"]}
    assert failed.keys() == {"bytes there and back, ssd", "training, ssd"}
    assert "1, 4097, 70003 bytes came back changed" in failed["bytes there and back, ssd"]
    assert "losses and weights differ" in failed["training, ssd"]
    assert "Do not train with it here." in check(tmp_path).stdout


def test_memory_that_stays_is_found(tmp_path, monkeypatch):
    held = []
    adopt = Transfer.adopt
    monkeypatch.setattr(Transfer, "adopt", lambda transfer, record: (held.append(record), adopt(transfer, record)))
    result = check(tmp_path, "--json")
    failed = [one for one in json.loads(result.stdout)["checks"] if not one["passed"]]
    assert any("left in memory after a step" in one["detail"] for one in failed)
    assert result.exit_code == 1


def test_an_error_is_an_answer(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(self_test, "_check_bytes", fail)
    result = check(tmp_path)
    assert result.exit_code == 1
    assert result.stdout.count("RuntimeError: no kernel image") == 2


def test_a_folder_that_is_none_is_refused(tmp_path):
    result = check(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "does not exist" in " ".join(result.stderr.split())
