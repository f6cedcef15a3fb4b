"""What kind of file system a directory lies on, and whether it may hold a disk tier."""

import logging
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_offload.errors import OffloadConfigError
from hf_offload.settings.shown import shown
from hf_offload.settings.text_files import reason_of

logger = logging.getLogger(__name__)

# Activations would cross the network, and an unlinked file of another host's server is not ours alone.
_NETWORK = """
    nfs nfs3 nfs4 cifs smb smb2 smb3 smbfs ncpfs afs openafs auristorfs coda ceph lustre gpfs mmfs panfs beegfs
    orangefs pvfs2 glusterfs ocfs2 gfs2 9p wekafs quobyte davfs
"""
_NETWORK_THROUGH_FUSE = """
    sshfs glusterfs ceph ceph-fuse s3fs goofys gcsfuse gcsfs mount-s3 mountpoint-s3 rclone blobfuse blobfuse2
    juicefs davfs davfs2 curlftpfs moosefs seaweedfs beegfs quobyte alluxio-fuse
"""
NETWORK_FILE_SYSTEMS = frozenset(_NETWORK.split()) | {f"fuse.{name}" for name in _NETWORK_THROUGH_FUSE.split()}
_MOST_LINKS = 40  # as many as the kernel follows
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})


def parse_mountinfo(text: str) -> list[tuple[str, str]]:
    """``[(mount point, file-system type), ...]`` in mount order, from the text of ``/proc/self/mountinfo``
    (proc(5)).
    """
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if separator and len(fields) >= 5 and right.split():
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            mounts.append((point, right.split()[0]))
    return mounts


def file_system_of(path: Path, mountinfo: str | None = None) -> str:
    """Type of the file system that holds ``path``, such as ``"ext4"``; ``"unknown"`` where the kernel does not tell."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return "unknown"
    target = os.path.realpath(path)
    best_length, best_type = -1, "unknown"
    for point, kind in parse_mountinfo(mountinfo):
        inside = point == "/" or target == point or target.startswith(point + "/")
        if inside and len(point) >= best_length:  # ">=": of two mounts on one point the later one is on top
            best_length, best_type = len(point), kind
    return best_type


def check_directory(path: str | os.PathLike[str], mountinfo: str | None = None, *, quiet: bool = False) -> str:
    """Return the directory's file-system type, or raise :class:`OffloadConfigError` with the reason why it cannot be used.

    One in RAM is warned of, unless ``quiet``.
    """
    path = Path(path)
    if sys.platform != "linux":
        raise OffloadConfigError(
            f"tier='ssd' needs Linux, and this is {sys.platform}: unlinked files, preallocation and direct I/O differ. "
            "Use tier='ram', or tier='none'."
        )
    try:
        _refuse_foreign_links(path)
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        raise OffloadConfigError(
            f"directory {shown(str(path))} does not exist: create it, or name another one."
        ) from None
    except OffloadConfigError:
        raise
    except (OSError, ValueError) as error:  # links in a circle, long names, a private folder on the way
        raise OffloadConfigError(
            f"directory {shown(str(path))} cannot be used: {reason_of(error)}. Name another one."
        ) from error
    if not is_directory:
        raise OffloadConfigError(f"directory {str(path)!r} is a file: name a directory on a local drive.")
    kind = file_system_of(path, mountinfo)
    if kind in NETWORK_FILE_SYSTEMS:
        raise OffloadConfigError(
            f"directory {str(path)!r} lies on the network file system {kind}: every step would wait for the network "
            "and load its servers. Name a directory on a local drive."
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise OffloadConfigError(
            f"directory {str(path)!r} is not writable for this user: change its mode, or name another."
        )
    if kind in MEMORY_FILE_SYSTEMS and not quiet:
        logger.warning(
            "directory %s is a %s: it works, but it is RAM, so nothing leaves memory. Name a directory on a drive.",
            path,
            kind,
        )
    return kind


def _refuse_foreign_links(path: Path) -> None:
    """Refuse a path that another user can point elsewhere at any moment: one through a symbolic link of theirs."""
    for link in _links(path):
        owner = link.lstat().st_uid
        if owner not in (0, os.geteuid()):
            raise OffloadConfigError(
                f"directory {str(path)!r} goes through {str(link)!r}, a symbolic link that belongs to another user (uid "
                f"{owner}), who could point it elsewhere: name the directory itself, {os.path.realpath(path)!r}."
            )


def _links(path: Path) -> Iterator[Path]:
    """Every symbolic link that is followed on the way to ``path``, links behind links included."""
    here, *rest = path.absolute().parts
    current, left, followed = Path(here), rest[::-1], 0
    while left and followed < _MOST_LINKS:
        part = left.pop()
        current = current.parent if part == ".." else current / part
        if current.is_symlink():
            yield current
            followed += 1
            target = current.readlink()
            current = Path(target.anchor) if target.is_absolute() else current.parent
            left += [name for name in reversed(target.parts) if name != target.anchor]


def free_disk_bytes(directories: Iterable[str | os.PathLike[str]]) -> int:
    """Bytes this user may still write under the directories together; a file system named twice counts once."""
    free = {}
    for directory in directories:
        info = os.statvfs(directory)
        free[Path(directory).stat().st_dev] = info.f_bavail * info.f_frsize
    return sum(free.values())
