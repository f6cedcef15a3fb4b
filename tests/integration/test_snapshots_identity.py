"""Whose a snapshot is: it is taken by the training that it is of, wherever its output directory has gone, and by no other."""

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from hf_offload.errors import SnapshotError
from hf_offload.settings.environment import RESUME_VARIABLE
from hf_offload.snapshots import disk as on_disk
from hf_offload.snapshots import ended, identity
from hf_offload.snapshots.memory import MemoryFile
from tests.faults.killed_snapshots import held_by, same
from tests.helpers.snapshot_loops import STEPS, Stops, net, trained
from tests.helpers.snapshot_processes import no_process_is_left, until  # noqa: F401  a fixture for all tests


def dies(folder, step=7, **settings):
    with pytest.raises(Stops):
        trained(folder, step, **settings)


def forget_memory(folder):
    """As the machine does when it starts again."""
    os.kill(held_by(folder)["pid"], signal.SIGKILL)
    until(lambda: held_by(folder) is None)


@pytest.fixture
def whole(tmp_path):
    return trained(tmp_path / "whole")[1]


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_an_output_directory_that_was_moved_is_that_of_the_same_training(whole, tmp_path, place):
    settings = {"snapshot_dir": str(tmp_path / "disk")}
    dies(tmp_path / "run", **settings)
    if place == "disk":
        until(lambda: (tmp_path / "disk" / "checkpoint-6").exists())
        forget_memory(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    begun, found = trained(tmp_path / "moved", resume=True, **settings)
    assert begun == 6
    assert same(whole, found)
    assert identity.known_training(tmp_path / "moved").output == str(tmp_path / "moved")


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
def test_a_snapshot_dir_of_another_training_that_has_not_ended_is_refused(whole, tmp_path, resume):
    settings = {"snapshot_dir": str(tmp_path / "disk")}
    dies(tmp_path / "run", **settings)
    until(lambda: (tmp_path / "disk" / "checkpoint-6").exists())
    forget_memory(tmp_path / "run")
    with pytest.raises(
        SnapshotError, match=rf"{tmp_path}/disk holds snapshots of another training, .*{tmp_path}/run and"
    ):
        trained(tmp_path / "other", resume=resume, **settings)
    begun, found = trained(tmp_path / "run", resume=True, **settings)
    assert begun == 6
    assert same(whole, found)


def test_an_output_directory_that_was_lost_is_known_again_by_the_file_that_the_error_names(whole, tmp_path):
    settings = {"snapshot_dir": str(tmp_path / "disk")}
    dies(tmp_path / "run", **settings)
    until(lambda: (tmp_path / "disk" / "checkpoint-6").exists())
    forget_memory(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    mark = tmp_path / "disk" / on_disk.MARK_FILE
    with pytest.raises(SnapshotError, match=rf"copy {mark} to {tmp_path}/run"):
        trained(tmp_path / "run", resume=True, **settings)
    shutil.copy(mark, tmp_path / "run")
    begun, found = trained(tmp_path / "run", resume=True, **settings)
    assert begun == 6
    assert same(whole, found)


def test_a_snapshot_dir_goes_to_the_next_training_once_one_has_ended_well(tmp_path, caplog):
    disk = tmp_path / "disk"
    model = net()
    trained(tmp_path / "first", model=model, snapshot_dir=str(disk))
    assert (disk / on_disk.MARK_FILE).exists()
    ended.end_well()
    assert not (disk / on_disk.MARK_FILE).exists()
    begun, _ = trained(tmp_path / "second", resume=True, snapshot_dir=str(disk))
    assert begun == 0
    assert f"The snapshot of step {STEPS} in {disk / f'checkpoint-{STEPS}'} is of another training" in caplog.text


@pytest.fixture
def start_again(monkeypatch):
    """As in a process of its own, which ``hf-offload launch`` has started for the second time."""
    monkeypatch.setenv(RESUME_VARIABLE, "1")
    yield lambda: monkeypatch.setattr(ended, "_process", ended._Process(0, {}))
    ended.end_well()


@pytest.mark.parametrize("disk", [False, True])
def test_of_several_trainings_in_one_directory_each_goes_on_from_its_own_snapshot(disk, tmp_path, start_again, caplog):
    """The second one had died: the first is made again, as is the second then."""
    folder = tmp_path / "run"
    settings = {"snapshot_dir": str(tmp_path / "disk")} if disk else {}
    expected = trained(folder, **settings)[1]
    dies(folder, **settings)
    start_again()
    begun, found = trained(folder, resume=None, **settings)
    assert begun == 0
    assert same(expected, found)
    assert "that of training number 2 of its process" in caplog.text
    assert "this one is number 1: it starts at its beginning" in caplog.text
    begun, found = trained(folder, resume=None, **settings)
    assert begun == 0
    assert same(expected, found)


def test_one_that_died_goes_on_and_is_tried_again_in_the_same_process(tmp_path, start_again):
    dies(tmp_path / "run")
    start_again()
    dies(tmp_path / "run", step=9, resume=None)
    begun, _ = trained(tmp_path / "run", resume=None)
    assert begun == 8
    begun, _ = trained(tmp_path / "run", resume=None)
    assert begun == 0  # the second one


def test_one_that_is_asked_to_go_on_does_so_and_says_whose_snapshot_it_is(tmp_path, start_again, caplog):
    trained(tmp_path / "run")
    dies(tmp_path / "run")
    start_again()
    dies(tmp_path / "run", step=9, resume=True)
    begun, _ = trained(tmp_path / "run", resume=None)
    assert begun == 8
    assert "this one is number 1: it goes on from it, as was asked for" in caplog.text


@pytest.fixture
def small_drive(monkeypatch):
    """What is written to folders fills them: so many bytes fit into each one's parent."""

    def holds(nbytes):
        copy = on_disk.copy

        def limited(into, source, offset, count):
            folder = Path(f"/proc/self/fd/{into}").readlink().parent.parent
            if sum(path.stat().st_size for path in folder.glob("*checkpoint-*/*")) + count > nbytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            copy(into, source, offset, count)

        monkeypatch.setattr(on_disk, "copy", limited)

    return holds


def test_a_full_drive_loses_what_would_be_removed_next_and_never_the_newest_of_the_run(tmp_path, small_drive):
    file = MemoryFile()
    file.write(bytes(10_000))

    def write(run, step, count=10_000):
        record = {"run": run, "sequence": step, "step": step, "files": [["weights", count, file.checksum]]}
        on_disk.write_checkpoint(tmp_path, record, [file.number])

    def steps():
        return sorted(int(path.name.partition("-")[2]) for path in tmp_path.glob("checkpoint-*"))

    write("earlier", 8)
    write("earlier", 9)
    small_drive(25_000)
    write("this", 1)
    assert steps() == [1]
    write("this", 2)
    assert steps() == [1, 2]
    write("this", 3)
    assert steps() == [2, 3]
    with pytest.raises(OSError, match="No space left"):
        write("this", 4, 20_000)
    assert steps() == [3]


def test_a_training_that_has_ended_well_goes_on_from_its_last_snapshot_on_disk(tmp_path):
    settings = {"snapshot_dir": str(tmp_path / "disk")}
    trained(tmp_path / "run", **settings)
    ended.end_well()
    assert trained(tmp_path / "run", resume=True, **settings)[0] == STEPS


def test_a_snapshot_dir_that_was_claimed_without_a_snapshot_is_given_to_another_one(tmp_path, caplog):
    """The first one trains still, and is told so by its snapshot process."""
    disk = tmp_path / "disk"
    disk.mkdir()
    first = identity.training_of(tmp_path / "first")
    identity.claim(disk, first)
    identity.claim(disk, identity.training_of(tmp_path / "second"))
    record = {"run": "run", "training": first.number, "sequence": 1, "step": 1, "files": []}
    with pytest.raises(OSError, match=rf"another training now, which writes to {tmp_path}/second"):
        on_disk.write_checkpoint(disk, record, [])
    identity.release(disk, first)
    assert (disk / on_disk.MARK_FILE).exists()


def test_snapshots_in_the_output_directory_itself(whole, tmp_path):
    settings = {"snapshot_dir": str(tmp_path / "run")}
    dies(tmp_path / "run", **settings)
    until(lambda: (tmp_path / "run" / "checkpoint-6").exists())
    forget_memory(tmp_path / "run")
    begun, found = trained(tmp_path / "run", resume=True, **settings)
    assert begun == 6
    assert same(whole, found)
    assert (tmp_path / "run" / on_disk.MARK_FILE).exists()


def test_a_damaged_mark_is_one_that_nobody_knows(tmp_path):
    first = identity.training_of(tmp_path)
    (tmp_path / on_disk.MARK_FILE).write_text("{")
    second = identity.training_of(tmp_path)
    assert second.number != first.number
    assert identity.training_of(tmp_path) == second


def test_two_that_start_at_once_are_one_training(tmp_path, monkeypatch):
    """Both have seen no mark."""
    first = identity.training_of(tmp_path)
    known = identity.known_training
    looks = iter([None])
    monkeypatch.setattr(identity, "known_training", lambda folder: next(looks, known(folder)))
    assert identity.training_of(tmp_path) == first


def test_an_output_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="nothing can be written there"):
        trained(tmp_path / "file" / "run")
