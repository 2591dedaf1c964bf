"""Where a database may lie: its path, and the file systems on which WAL mode is safe."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from token_id_capture.errors import StorageFullError, UnsupportedFileSystemError, UnusableDatabaseError
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore, UnknownFileSystemWarning, VolatileStorageWarning
from token_id_capture.store.file import location
from token_id_capture.store.file.location import check_file_system, database_path, file_system_of

MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:26 / /mnt/my\\040data rw shared:2 - nfs4 server:/export rw,vers=4.2
31 22 0:27 / /mnt rw - xfs /dev/vdb rw
32 22 0:28 / /home rw - autofs systemd-1 rw
33 22 0:29 / /home rw master:3 propagate_from:2 - fuse.sshfs user@host: rw
34 22 0:30 / /host rw - 9p share rw
35 22 0:31 / /mnt/data rw - virtiofs share rw
36 22 0:32 / /mnt/data/local rw - btrfs /dev/vdc rw
a line that is no mount
"""


@pytest.fixture
def mounts(tmp_path: Path) -> str:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    return str(path)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/captures.db", "ext4"),
        ("/mnt/captures.db", "xfs"),
        ("/mnt/my data/captures.db", "nfs4"),
        ("/mnt/my data", "nfs4"),
        ("/mnt/my database/captures.db", "xfs"),
        ("/home/me/captures.db", "fuse.sshfs"),
        ("/host/captures.db", "9p"),
        ("/mnt/data/captures.db", "virtiofs"),
        ("/mnt/data/local/deep/down/captures.db", "btrfs"),
    ],
)
def test_the_longest_and_latest_mount_that_holds_a_path_counts(path: str, kind: str, mounts: str) -> None:
    assert file_system_of(Path(path), mounts) == kind


def test_a_link_is_followed_to_where_the_file_would_be(tmp_path: Path, mounts: str) -> None:
    (tmp_path / "link").symlink_to("/mnt/my data")
    assert file_system_of(tmp_path / "link" / "captures.db", mounts) == "nfs4"


def test_a_system_without_a_list_of_mounts_says_nothing(tmp_path: Path) -> None:
    assert file_system_of(tmp_path / "captures.db", str(tmp_path / "missing")) is None


@pytest.mark.parametrize(
    "kind",
    [
        *("nfs", "nfs3", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse", "fuse.sshfs", "fuse.gcsfuse"),
        *("ceph", "lustre", "glusterfs", "beegfs", "beegfs_nodev", "afs", "vboxsf", "gpfs", "wekafs", "panfs"),
        *("pvfs2", "orangefs", "gfs2", "ocfs2", "dvs", "fakeowner", "prl_fs", "vmhgfs", "drvfs"),
    ],
)
def test_a_network_or_pass_through_file_system_is_refused_with_what_to_do(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location, "file_system_of", lambda path: kind)
    with pytest.raises(UnsupportedFileSystemError, match=rf"lies on {kind}.*local disk"):
        check_file_system(tmp_path / "captures.db")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", None])
def test_a_local_file_system_is_taken_without_a_word(
    kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location, "file_system_of", lambda path: kind)
    check_file_system(tmp_path / "captures.db")


def test_a_file_system_that_nobody_knows_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "file_system_of", lambda path: "futurefs")
    with pytest.warns(UnknownFileSystemWarning, match="lies on futurefs"):
        check_file_system(tmp_path / "captures.db")


async def test_nothing_is_created_on_a_refused_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(location, "file_system_of", lambda path: "nfs4")
    store = TokenCaptureStore(tmp_path / "new" / "captures.db")
    with pytest.raises(UnsupportedFileSystemError):
        await store.open()
    await store.close()
    assert os.listdir(tmp_path) == []


@pytest.fixture
def memory_file_system(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "memory"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", directory], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


async def test_a_store_in_memory_works_and_warns_and_a_full_one_recovers(memory_file_system: Path) -> None:
    def entry(call: str, tokens: int) -> TokenEntry:
        numbers = range(tokens)
        return TokenEntry(
            rollout_id="first",
            model_call_id=call,
            prompt_token_ids=numbers,
            generation_token_ids=numbers,
            generation_log_probs=[-0.5] * tokens,
        )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", VolatileStorageWarning)
        async with TokenCaptureStore(memory_file_system / "captures.db", free_space_floor=0) as store:
            await store.put(entry("before", 10))
            ballast = memory_file_system / "ballast"
            ballast.write_bytes(bytes(_free(memory_file_system) - 100_000))
            failed = 0
            for number in range(20):
                try:
                    await store.put(entry(f"during{number}", 1000))
                except StorageFullError:
                    failed += 1
            assert 0 < failed < 20
            ballast.unlink()
            await store.put(entry("after", 1000))
            stored = [call.model_call_id for call in await store.read_entries("first")]
    assert stored[0] == "before"
    assert stored[-1] == "after"
    assert len(stored) == 22 - failed
    assert any(warning.category is VolatileStorageWarning for warning in caught)


def _free(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def test_a_directory_means_the_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "with.suffix").mkdir()
    assert database_path(tmp_path) == tmp_path / "token_captures.db"
    assert database_path(tmp_path / "with.suffix") == tmp_path / "with.suffix" / "token_captures.db"
    assert database_path(tmp_path / "not-there-yet") == tmp_path / "not-there-yet" / "token_captures.db"
    assert database_path(f"{tmp_path}/with.slash/") == tmp_path / "with.slash" / "token_captures.db"


def test_anything_else_means_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert database_path(tmp_path / "captures.db") == tmp_path / "captures.db"
    assert database_path(tmp_path / "plain") == tmp_path / "plain"
    assert database_path("captures.db") == tmp_path / "captures.db"
    assert database_path("sqlite:///captures.db") == tmp_path / "captures.db"
    assert database_path(f"sqlite:///{tmp_path}/captures.db") == tmp_path / "captures.db"
    assert database_path("sqlite+aiosqlite:////var/a%20b.db?cache=shared") == Path("/var/a b.db")


@pytest.mark.parametrize("url", ["postgresql://host/db", "sqlite://", "sqlite:///:memory:", "sqlite+pysqlite://"])
def test_a_url_of_another_database_or_of_one_in_memory_is_refused(url: str) -> None:
    with pytest.raises(UnusableDatabaseError, match="sqlite:////absolute"):
        database_path(url)
