"""Whose a snapshot is: it is taken by the training that it is of, wherever its output directory has gone, and by no other."""

import errno
import os
import shutil

import pytest

from hf_offload.errors import SnapshotError
from hf_offload.settings.environment import RESUME_VARIABLE
from hf_offload.snapshots import disk as on_disk
from hf_offload.snapshots import restoring, taking
from hf_offload.snapshots.contents import MemoryFile
from tests.faults.killed_snapshots import same
from tests.helpers.snapshot_loops import STEPS, Stops, trained
from tests.helpers.snapshot_processes import end_process, no_process_is_left, until  # noqa: F401  a fixture for all tests

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # which torchdata calls


def dies(folder, step=7, **settings):
    with pytest.raises(Stops):
        trained(folder, step, **settings)


@pytest.fixture
def whole(tmp_path):
    return trained(tmp_path / "whole")[1]


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_an_output_directory_that_was_moved_is_that_of_the_same_training(whole, tmp_path, place):
    settings = {"snapshot_dir": str(tmp_path / "disk")}
    dies(tmp_path / "run", **settings)
    if place == "disk":
        until(lambda: (tmp_path / "disk" / "checkpoint-6").exists())
        end_process(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    begun, found = trained(tmp_path / "moved", resume=True, **settings)
    assert begun == 6
    assert same(whole, found)
    assert restoring.known_training(tmp_path / "moved")["output"] == str(tmp_path / "moved")


def test_a_copy_is_another_training(tmp_path, caplog):
    dies(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert trained(tmp_path / "copy", resume=True)[0] == 0
    assert f"{tmp_path / 'copy'} is a copy of {tmp_path / 'run'}" in caplog.text
    assert trained(tmp_path / "run", resume=True)[0] == 6


def test_another_directory_at_the_same_path_is_another_training(tmp_path):
    """As in two containers that see each other's processes."""
    dies(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert trained(tmp_path / "run", resume=True)[0] == 0
    (tmp_path / "run").rename(tmp_path / "other")
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    assert trained(tmp_path / "run", resume=True)[0] == 6


@pytest.mark.parametrize("resume", [True, False])
def test_a_snapshot_dir_of_another_training_is_refused(whole, tmp_path, resume):
    settings = {"snapshot_dir": str(tmp_path / "disk")}
    dies(tmp_path / "run", **settings)
    until(lambda: (tmp_path / "disk" / "checkpoint-6").exists())
    end_process(tmp_path / "run")
    with pytest.raises(
        SnapshotError, match=rf"{tmp_path}/disk holds snapshots of another training, .*{tmp_path}/run: name"
    ):
        trained(tmp_path / "other", resume=resume, **settings)
    begun, found = trained(tmp_path / "run", resume=True, **settings)
    assert begun == 6
    assert same(whole, found)
    for path in (tmp_path / "disk").glob("checkpoint-*"):
        shutil.rmtree(path)
    assert trained(tmp_path / "other", resume=resume, **settings)[0] == 0


@pytest.fixture
def start_again(monkeypatch):
    """As in a process of its own, which ``hf-offload launch`` has started for the second time."""
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    return taking._ended.clear


@pytest.mark.parametrize("resume", [None, False])
def test_a_second_training_of_a_process_in_one_directory_is_refused(tmp_path, start_again, resume):
    """Folds of a cross-validation: the first would go on from the snapshot of the second after a restart."""
    folder = tmp_path / "run"
    trained(folder, resume=resume)
    with pytest.raises(
        SnapshotError, match=rf"This process has trained in {folder} already, .*a.* directory of its own"
    ):
        trained(folder, resume=resume)
    trained(tmp_path / "other", resume=resume)
    assert trained(folder, resume=True)[0] == 0  # the first one has let its snapshots go


def test_one_that_died_goes_on_and_is_tried_again_in_the_same_process(tmp_path, start_again):
    dies(tmp_path / "run")
    start_again()
    dies(tmp_path / "run", step=9, resume=None)
    assert trained(tmp_path / "run", resume=None)[0] == 8


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "failing"])
def test_a_drive_that_is_full_or_fails_loses_no_snapshot_that_is_there(tmp_path, monkeypatch, error):
    file = MemoryFile()
    file.write(bytes(10_000))

    def write(name, step):
        record = {"run": name, "step": step, "files": [["weights", 10_000, file.checksum]]}
        on_disk.write_checkpoint(tmp_path, record, [file.number])

    def steps():
        return sorted(int(path.name.partition("-")[2]) for path in tmp_path.glob("checkpoint-*"))

    write("earlier", 8)
    write("earlier", 9)
    write("this", 1)
    assert steps() == [1]
    write("this", 2)
    write("this", 3)
    assert steps() == [2, 3]
    write("this", 1)  # the later ones were found damaged
    assert steps() == [1]
    write("this", 2)
    write("this", 3)
    assert steps() == [2, 3]

    def fails(source, into):
        into.write_bytes(bytes(5_000))
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(shutil, "copyfile", fails)
    with pytest.raises(OSError, match=os.strerror(error)):
        write("this", 4)
    assert steps() == [2, 3]
    assert not list(tmp_path.glob(".*"))
    assert [restoring.damage_on_disk(tmp_path / f"checkpoint-{step}") for step in steps()] == [None, None]


def test_a_training_that_has_ended_well_goes_on_from_its_last_snapshot_on_disk(tmp_path):
    """In the output directory itself."""
    settings = {"snapshot_dir": str(tmp_path / "run")}
    trained(tmp_path / "run", **settings)
    assert trained(tmp_path / "run", resume=True, **settings)[0] == STEPS


def test_a_damaged_mark_is_one_that_is_not_known(tmp_path):
    first = restoring.training_of(tmp_path)
    (tmp_path / restoring.MARK_FILE).write_text("{")
    second = restoring.training_of(tmp_path)
    assert second["training"] != first["training"]
    assert restoring.training_of(tmp_path) == second


def test_an_output_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="nothing can be written there"):
        trained(tmp_path / "file" / "run")
