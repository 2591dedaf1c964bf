"""Where a capture database may lie: its path, and the file systems on which WAL mode is safe.

WAL mode shares memory between processes through a mapped file, so it needs one kernel and coherent
``mmap`` (https://www.sqlite.org/wal.html). Network and pass-through file systems have neither, and
fail silently.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from token_id_capture.errors import UnsupportedFileSystemError, UnusableDatabaseError
from token_id_capture.store.file.warnings import UnknownFileSystemWarning, VolatileStorageWarning, warn

DATABASE_NAME: Final = "token_captures.db"

FREE_SPACE_FLOOR: Final = 64 * 2**20
"""Bytes that are left free on the disk: no call begins or is stored beyond, and flags and freezes still fit."""

_VOLATILE: Final = ("tmpfs", "ramfs")
_LOCAL: Final = (
    *("apfs", "aufs", "bcachefs", "btrfs", "ecryptfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs", "nilfs2"),
    *("overlay", "reiserfs", "ufs", "xfs", "zfs", *_VOLATILE),
)
# Their names alone, or with a version behind: nfs4, smb3, beegfs_nodev.
_SHARED: Final = (
    *("9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "cvfs", "drvfs", "dvs", "fakeowner", "fuse.", "gfs"),
    *("gluster", "gpfs", "lustre", "mmfs", "ncpfs", "nfs", "ocfs", "orangefs", "panfs", "prl_fs", "pvfs", "smb"),
    *("vboxsf", "virtiofs", "vmhgfs", "weka"),
)


def database_path(database: str | Path) -> Path:
    """The absolute path of the database file that ``database`` means.

    A directory, an existing one or a path without a suffix, means the file ``token_captures.db`` in
    it. An SQLAlchemy URL (``sqlite:///relative``, ``sqlite:////absolute``) means its file.

    Raises:
        UnusableDatabaseError: no name, a URL of another database system or of one in memory, or something that is
            neither a file nor a directory.
    """
    text = os.fspath(database)
    if not text:
        # As a path it would be the current directory: mostly it is a variable that was never set.
        raise UnusableDatabaseError("the name of the database is empty: name a file or a directory")
    if "://" in text:
        scheme, _, rest = text.partition("://")
        name = unquote(rest.partition("?")[0]).removeprefix("/")
        if scheme.partition("+")[0] != "sqlite" or not name or name.startswith(":"):
            raise UnusableDatabaseError(
                f"cannot use {scheme}://... as the file of a capture database: name a path, or an SQLite URL as in "
                "sqlite:////absolute/path/captures.db. A store also takes postgresql://user@host/database"
            )
        return Path(os.path.realpath(name))
    # Links are followed once, here: SQLite puts its log beside the file itself.
    path = Path(text)
    try:
        path = Path(os.path.realpath(text))
        if path.is_dir() or text.endswith(os.sep) or (not path.suffix and not path.exists()):
            path = Path(os.path.realpath(path / DATABASE_NAME))
        special = path.exists() and not (path.is_file() or path.is_dir())
    except OSError as error:
        raise UnusableDatabaseError(f"cannot open {path}: {error.strerror}") from error
    if special:
        # To open a pipe would wait for whoever writes it.
        raise UnusableDatabaseError(f"{path} is neither a file nor a directory: name another database")
    return path


def file_uri(path: Path, mode: str) -> str:
    """The URI of a database file for SQLite; ``mode`` is ``ro`` or ``rw``."""
    return f"file:{quote(str(path))}?mode={mode}"


def reading_uri(path: Path) -> str:
    """The URI with which SQLite reads a database file that somebody may be writing.

    WAL mode keeps an index beside the file, which even a reader has to make if it is not there. Where it may not,
    and the log that the index is about is not there either, the file alone is the whole database.
    """
    return file_uri(path, "ro") + ("&immutable=1" if stands_alone(path) else "")


def stands_alone(path: Path) -> bool:
    """Whether the file is closed, and lies where this process may make no file beside it, as on a read-only mount."""
    log, index = Path(f"{path}-wal"), Path(f"{path}-shm")
    closed = not log.exists() or (log.stat().st_size == 0 and not index.exists())
    return closed and not os.access(path.parent, os.W_OK)


def missing(path: Path) -> UnusableDatabaseError:
    """The error for a database that should exist and does not."""
    return UnusableDatabaseError(f"there is no capture database at {path}: check the path given with --database")


def check_file_system(path: Path) -> None:
    """Refuse a place where WAL mode loses data; warn where a restart of the machine does, or where nobody knows.

    Raises:
        UnsupportedFileSystemError: a network or pass-through file system.
    """
    kind = file_system_of(path)
    if kind is None:
        return
    if is_refused(kind):
        raise UnsupportedFileSystemError(
            f"{path} lies on {kind}, where several processes cannot share a WAL database without losing data. "
            "Put it on a local disk of this machine, and copy it afterwards with tokcap backup."
        )
    if not is_known(kind):
        warn(
            f"{path} lies on {kind}, a file system that this release does not know: WAL mode needs one on a disk of "
            "this machine, shared with no other. Ask its administrator, or use a local disk.",
            UnknownFileSystemWarning,
        )
    if is_volatile(kind):
        warn(
            f"{path} lies on {kind}: a restart of the machine loses it. Use a disk for runs that matter.",
            VolatileStorageWarning,
        )


def is_refused(kind: str) -> bool:
    """Whether WAL mode loses data on this type of file system."""
    return kind == "fuse" or (kind not in _LOCAL and kind.startswith(_SHARED))


def is_known(kind: str) -> bool:
    """Whether it is certain that WAL mode works on this type of file system, or that it does not."""
    return kind in _LOCAL or is_refused(kind)


def is_volatile(kind: str) -> bool:
    """Whether a restart of the machine empties this type of file system."""
    return kind.partition(".")[0] in _VOLATILE


def file_system_of(path: Path, mounts: str = "/proc/self/mountinfo") -> str | None:
    """The type of the file system that holds ``path`` (which need not exist yet).

    None where the system does not say, as on macOS.
    """
    if sys.platform != "linux":
        return None
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    real = os.path.realpath(path)
    best, kind = -1, None
    for line in lines:
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if not separator or len(fields) < 5:
            continue
        mount_point = _unescape(fields[4])
        inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
        # A later line of the same length was mounted over the earlier one.
        if inside and len(mount_point) >= best:
            best, kind = len(mount_point), right.split()[0]
    return kind


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
