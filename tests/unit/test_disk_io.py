import ctypes
import errno
import logging
import os
import subprocess
import sys

import pytest

from hf_offload.errors import OffloadConfigError
from hf_offload.storage import disk_io, file_systems
from hf_offload.storage.disk_io import DataFile, DirectIo, probe_direct_io
from hf_offload.storage.file_systems import check_directory, file_system_of, free_disk_bytes, parse_mountinfo

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 27 0:50 / /home rw,relatime shared:3 - nfs4 server:/home rw,vers=4.2
41 40 8:1 / /home/local rw,relatime shared:4 master:1 - xfs /dev/sda1 rw
42 27 0:51 / /mnt/two\040words rw - fuse.sshfs me@host: rw
43 27 0:52 / /mnt/over rw - ext4 /dev/sdb1 rw
44 43 0:53 / /mnt/over rw - lustre mgs:/fs rw
not a mount line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/tmp/x", "ext4"),
        ("/home/ann", "nfs4"),
        ("/home/local/scratch", "xfs"),
        ("/homely", "ext4"),
        ("/mnt/two words/dir", "fuse.sshfs"),
        ("/mnt/over/dir", "lustre"),
    ],
)
def test_the_innermost_mount_decides(path, kind):
    assert file_system_of(path, MOUNTS) == kind


def test_mountinfo_without_a_root_is_unknown():
    assert file_system_of("/tmp", "") == "unknown"
    assert ("/mnt/two words", "fuse.sshfs") in parse_mountinfo(MOUNTS)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "lustre", "fuse.sshfs"])
def test_network_file_systems_are_refused_by_name(tmp_path, kind):
    with pytest.raises(OffloadConfigError, match=rf"{tmp_path}.*network file system {kind}:.*local drive"):
        check_directory(tmp_path, f"1 1 0:1 / / rw - {kind} server rw")


def test_a_local_directory_is_accepted(tmp_path):
    assert check_directory(tmp_path, MOUNTS) == "ext4"


def test_missing_file_and_unwritable_directories_are_told_apart(tmp_path, monkeypatch):
    with pytest.raises(OffloadConfigError, match="does not exist"):
        check_directory(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(OffloadConfigError, match="is a file"):
        check_directory(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OffloadConfigError, match="not writable"):
        check_directory(tmp_path)


def test_why_a_directory_cannot_be_looked_up_is_said(tmp_path):
    (tmp_path / "ring").symlink_to("ring")
    (tmp_path / "file").write_text("x")
    for path, reason in (
        (tmp_path / "ring", "symbolic links"),
        (tmp_path / "ring" / "inside", "symbolic links"),
        (tmp_path / "file" / "inside", "Not a directory"),
        (tmp_path / ("x" * 300), "name too long"),
        ("/" + "x/" * 3000, "name too long"),
    ):
        with pytest.raises(OffloadConfigError, match=rf"cannot be used: .*{reason}") as refused:
            check_directory(path)
        assert len(str(refused.value)) < 400


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_directory_below_another_users_private_one(tmp_path):
    (tmp_path / "private" / "inside").mkdir(parents=True)
    (tmp_path / "private").chmod(0o700)
    code = (
        "import os, sys\n"
        "from hf_offload.storage.file_systems import check_directory\n"
        "from hf_offload import OffloadConfigError\n"
        "os.setuid(65534)\n"
        "try: check_directory(sys.argv[1])\n"
        "except OffloadConfigError as error: print(error)\n"
    )
    path = str(tmp_path / "private" / "inside")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert "cannot be used: Permission denied. Name another one." in done.stdout, done.stderr


def test_other_platforms_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OffloadConfigError, match="needs Linux, and this is darwin"):
        check_directory(tmp_path)


def test_memory_file_systems_work_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert check_directory(tmp_path, "1 1 0:1 / / rw - tmpfs tmpfs rw") == "tmpfs"
    assert "it is RAM" in caplog.text
    assert not probe_direct_io(tmp_path, "tmpfs").usable


def test_a_read_only_file_system_is_a_configuration_error(tmp_path, monkeypatch):
    def refuse(path, flags):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk_io, "open_once", refuse)
    with pytest.raises(OffloadConfigError, match=rf"{tmp_path}.*Read-only"):
        DataFile(tmp_path)


def refuse_direct(monkeypatch):
    real = disk_io.open_once

    def open_once(path, flags):
        fd = real(path, flags & ~os.O_DIRECT)
        if flags & os.O_DIRECT:  # some file systems create the file and refuse then
            os.close(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fd

    monkeypatch.setattr(disk_io, "open_once", open_once)


def test_a_refusal_of_direct_io_falls_back_and_leaves_no_name(tmp_path, monkeypatch):
    refuse_direct(monkeypatch)
    file = DataFile(tmp_path)
    assert (file.direct.usable, file.direct.align_bytes) == (False, 1)
    assert "refuses O_DIRECT" in file.direct.reason
    assert list(tmp_path.iterdir()) == []
    file.grow(4096)
    file.write(memoryview(b"abc"), 5)
    back = bytearray(3)
    file.read(memoryview(back), 5)
    assert back == b"abc"
    file.close()


def _only_4096(real):
    def strict(fd, data, offset):
        if len(data) % 4096 or offset % 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    return strict


@pytest.mark.parametrize("claimed", [None, 512])
def test_alignment_is_what_the_drive_takes_not_what_is_claimed(tmp_path, monkeypatch, claimed):
    if not probe_direct_io(tmp_path, "ext4").usable:
        pytest.skip("no direct I/O under the temporary directory")
    for name in ("write_once", "read_once"):
        monkeypatch.setattr(disk_io, name, _only_4096(getattr(disk_io, name)))
    monkeypatch.setattr(disk_io, "_claimed_alignment", lambda fd: claimed)
    found = probe_direct_io(tmp_path, "ext4")
    assert (found.usable, found.align_bytes) == (True, 4096)
    assert "found by trying" in found.reason


def test_a_drive_that_takes_no_block_is_used_through_the_cache(tmp_path, monkeypatch):
    def refuse(fd, data, offset):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(disk_io, "write_once", refuse)
    found = probe_direct_io(tmp_path, "ext4")
    assert (found.usable, found.align_bytes) == (False, 1)


def no_nameless_files(monkeypatch):
    """A file system without O_TMPFILE."""
    real = disk_io.open_once

    def open_once(path, flags):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags)

    monkeypatch.setattr(disk_io, "open_once", open_once)


@pytest.mark.parametrize("named", [False, True])
def test_files_are_private_without_a_name_and_closed_on_exec(tmp_path, monkeypatch, named):
    if named:
        no_nameless_files(monkeypatch)
    found = []
    real = disk_io.open_once

    def open_once(path, flags):
        fd = real(path, flags)
        found.append((oct(os.fstat(fd).st_mode & 0o777), os.get_inheritable(fd), path.startswith("/proc/self/fd/")))
        if not named:
            assert os.fstat(fd).st_nlink == 0, "the file had a name for a moment"
        return fd

    monkeypatch.setattr(disk_io, "open_once", open_once)
    file = DataFile(tmp_path)
    assert {each[:2] for each in found} == {("0o600", False)}
    if file.direct.usable:
        assert [again for *_, again in found] == [False, True] * 2
        assert os.path.sameopenfile(file._fd, file._buffered_fd)
    assert os.fstat(file._fd).st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    file.close()
    file.close()


def test_a_name_that_somebody_else_took_is_never_opened(tmp_path, monkeypatch):
    """Between the two openings of a file, whoever may write into the directory puts a file of his own in its place."""
    no_nameless_files(monkeypatch)
    trap = tmp_path / "trap"
    trap.write_bytes(b"")
    real = disk_io.open_once

    def open_once(path, flags):
        fd = real(path, flags)
        if flags & os.O_CREAT:
            os.unlink(path)  # noqa: PTH108  a string, as the caller has it
            os.link(trap, path)
        return fd

    monkeypatch.setattr(disk_io, "open_once", open_once)
    file = DataFile(tmp_path)
    file.grow(4096)
    file.close()
    assert trap.stat().st_size == 0
    assert [each.name for each in tmp_path.iterdir()] == ["trap"]


def test_growing_reserves_blocks_and_falls_back_where_that_is_unknown(tmp_path, monkeypatch):
    file = DataFile(tmp_path)
    file.grow(1 << 20)
    assert os.fstat(file._fd).st_size == 1 << 20
    assert os.fstat(file._fd).st_blocks * 512 >= 1 << 20
    monkeypatch.setattr(disk_io, "allocate_once", _raise(errno.EOPNOTSUPP))
    file.grow(4096)
    assert (os.fstat(file._fd).st_size, file.size_bytes) == ((1 << 20) + 4096,) * 2
    monkeypatch.setattr(disk_io, "allocate_once", _raise(errno.ENOSPC))
    with pytest.raises(OSError, match="ENOSPC"):
        file.grow(4096)
    assert (os.fstat(file._fd).st_size, file.size_bytes) == ((1 << 20) + 4096,) * 2
    file.close()


def _raise(number):
    def call(*_):
        raise OSError(number, errno.errorcode[number])

    return call


def test_buffered_writes_are_dropped_from_the_page_cache(tmp_path, monkeypatch):
    advised = []
    real = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: advised.append(call[1:]) or real(*call))
    monkeypatch.setattr(disk_io, "probe_direct_io", lambda *_: DirectIo(False, 1, "for this test"))
    file = DataFile(tmp_path)
    file.grow(1 << 20)
    if file.file_system in file_systems.MEMORY_FILE_SYSTEMS:
        pytest.skip("the temporary directory is a tmpfs, whose pages are the file itself")
    for index in range(12):
        file.write(memoryview(bytes(4096)), index * 4096)
    first = (0, 4096, os.POSIX_FADV_DONTNEED)
    assert advised.count(first) == 2, "once to start the write-back, once to drop the clean pages"
    advised.clear()
    file.read(memoryview(bytearray(4096)), 0)
    assert advised == [first]
    file.close()


def test_what_write_back_has_lost_is_an_error_for_good(tmp_path, monkeypatch):
    """The kernel tells it once, and not of which bytes."""
    monkeypatch.setattr(disk_io, "probe_direct_io", lambda *_: DirectIo(False, 1, "for this test"))
    file = DataFile(tmp_path)
    if file.file_system in file_systems.MEMORY_FILE_SYSTEMS:
        pytest.skip("the temporary directory is a tmpfs, which writes nothing back")
    file.grow(1 << 20)
    for index in range(2):
        file.write(memoryview(bytes(4096)), index * 4096)
    real, told = disk_io.settle_once, [errno.EIO]

    def settle(*call):
        if told:
            raise OSError(told.pop(), "Input/output error")
        real(*call)

    monkeypatch.setattr(disk_io, "settle_once", settle)
    for _ in range(2):
        with pytest.raises(OSError, match=r"lost something.*Input/output error"):
            file.read(memoryview(bytearray(4096)), 4096)
    with pytest.raises(OSError, match="lost something"):
        file.write(memoryview(bytes(4096)), 0)
    file.close()


def test_waiting_for_write_back_tells_of_errors_and_needs_no_kernel_of_its_own(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk_io.settle_once(-1, 0, 4096)

    class WithoutTheCall:
        def sync_file_range(self, *call):
            ctypes.set_errno(errno.ENOSYS)
            return -1

    synced = []
    monkeypatch.setattr(disk_io, "_libc", WithoutTheCall)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    disk_io.settle_once(7, 0, 4096)
    assert synced == [7]


def test_free_bytes_count_a_file_system_once(tmp_path):
    (tmp_path / "a").mkdir()
    one = free_disk_bytes([tmp_path])
    both = free_disk_bytes([tmp_path, tmp_path / "a"])
    assert one > 0
    assert both < 1.5 * one
