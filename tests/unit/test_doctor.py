import errno
import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from hf_offload.allocator import best_allocator
from hf_offload.cli.doctor import doctor
from hf_offload.planning import machine
from hf_offload.planning.machine import probe_machine
from hf_offload.storage import disk_io

MIB = 1 << 20


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(machine, "SAMPLE_BYTES", 8 * MIB)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(doctor)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_json_is_pure_and_complete(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    result = run("--json", "-d", tmp_path, "-d", other)
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert [drive["directory"] for drive in facts["drives"]] == [str(tmp_path), str(other)]
    for drive in facts["drives"]:
        assert drive["free_bytes"] > 0
        assert drive["direct_io"]["reason"]
        assert drive["write"]["source"] == drive["read"]["source"] == "measured"
        assert drive["write"]["bytes_per_s"] > 0
    assert facts["versions"]["torch"] == torch.__version__
    assert 0 < facts["ram_available_bytes"] <= facts["ram_total_bytes"]
    assert facts["device"]["type"] == ("cuda" if torch.cuda.is_available() else "cpu")
    effects = " ".join(facts["process_wide_effects"])
    for word in ("mallopt", "register_at_fork", "table of reporters"):
        assert word in effects
    for heading in ("effects_within_a_step", "effects_on_processes_that_commands_start", "files_that_are_kept"):
        assert facts[heading]
    assert list(other.iterdir()) == []


def test_the_table_shows_the_same(run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = run("-d", tmp_path)
    assert result.exit_code == 0
    for word in (
        str(tmp_path),
        "measured",
        "GPUDirect",
        "CPU allocator",
        f"start with {best_allocator()}",
        "mallopt",
        torch.__version__,
    ):
        assert word in result.stdout


def test_measuring_can_be_left_out(run, tmp_path):
    facts = json.loads(run("--json", "--no-measure", "-d", tmp_path).stdout)
    assert facts["drives"][0]["write"] == {"bytes_per_s": None, "source": "unknown", "reason": "not measured"}


def test_a_bad_directory_ends_with_one_line(run, tmp_path):
    result = run("--json", "-d", tmp_path, "-d", tmp_path / "none")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert "does not exist" in result.stderr


def test_the_measurement_goes_through_the_tier(tmp_path, monkeypatch):
    moved = {"write_once": 0, "read_once": 0}
    for name in moved:
        monkeypatch.setattr(disk_io, name, _counted(moved, name, getattr(disk_io, name)))
    probe_machine([tmp_path], sample_bytes=40 * MIB)
    # each way once, and half of it again while the other half goes the other way
    assert all(60 * MIB * 0.99 < count < 61 * MIB for count in moved.values())


def _counted(moved, name, real):
    def call(fd, data, offset):
        count = real(fd, data, offset)
        moved[name] += count
        return count

    return call


def test_too_little_room_is_unknown_not_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "free_disk_bytes", lambda _: 5 * MIB)
    drive = probe_machine([tmp_path], sample_bytes=4 * MIB).drives[0]
    assert (drive.write.bytes_per_s, drive.write.source) == (None, "unknown")
    assert "free" in drive.write.reason


def test_gpudirect_says_why_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine._gpu_direct() == machine.GpuDirectFacts(False, "there is no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def missing(name):
        raise ImportError("no such module")

    monkeypatch.setattr(machine.importlib, "import_module", missing)
    facts = machine._gpu_direct()
    assert not facts.usable
    assert "bindings are missing" in facts.reason


def test_where_direct_io_is_refused_the_report_says_so(tmp_path, monkeypatch):
    real = disk_io.open_once

    def refuse(path, flags):
        if flags & disk_io.os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr(disk_io, "open_once", refuse)
    direct = probe_machine([tmp_path], sample_bytes=0).drives[0].direct_io
    assert not direct.usable
    assert "refuses O_DIRECT" in direct.reason
