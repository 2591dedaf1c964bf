"""A database on a mount that nobody writes to: a closed one is read, one with a log says what to do."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.captured import filled, one_line, put_chain, sql
from support.commands import TOKCAP, clean_environment
from token_id_capture.store import TokenCaptureStore

_MAY_MOUNT = ["unshare", "--map-root-user", "--mount", "true"]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux"
    or shutil.which("unshare") is None
    or subprocess.run(_MAY_MOUNT, capture_output=True, check=False).returncode != 0,
    reason="this user may make no mount of its own",
)


async def one_open(store: TokenCaptureStore) -> None:
    await put_chain(store, "open")


def mounted(database: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command where the directory of the database is mounted read-only."""
    folder = shlex.quote(str(database.parent))
    mount = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder} {folder}"
    command = shlex.join([str(TOKCAP), *map(str, arguments), "-d", str(database)])
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{mount} && {command}"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def database(tmp_path: Path) -> Path:
    (tmp_path / "mount").mkdir()
    return filled(tmp_path / "mount" / "captures.db", one_open)


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "--json"],
        ["show", "open"],
        ["explain", "open"],
        ["sql", "SELECT count(*) FROM call_tokens"],
        ["verify"],
        ["export", "-o", "-", "--include-open"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_closed_database_is_read_where_nobody_can_write(database: Path, arguments: list[str]) -> None:
    shown = mounted(database, *arguments)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout or arguments == ["verify"]
    assert not [path for path in database.parent.iterdir() if path.name.endswith(("-wal", "-shm"))]


def test_a_copy_can_be_made_of_it(database: Path, tmp_path: Path) -> None:
    assert mounted(database, "backup", tmp_path / "copy.db").returncode == 0
    assert sql(tmp_path / "copy.db", "SELECT count(*) FROM entries") == [(3,)]


def test_one_with_a_log_says_to_copy_it_first(database: Path, tmp_path: Path) -> None:
    live = tmp_path / "live.db"
    shutil.move(database, live)
    with_a_log = f"import sqlite3; c = sqlite3.connect({str(live)!r}); c.execute('UPDATE writers SET pid = 1');"
    subprocess.run([sys.executable, "-c", f"{with_a_log} c.commit(); import os; os._exit(0)"], check=True)
    for suffix in ("", "-wal"):
        shutil.copy(f"{live}{suffix}", f"{database}{suffix}")
    refused = mounted(database, "ls")
    assert refused.returncode == 2
    assert "copy the file and its -wal to a directory of your own" in one_line(refused.stderr)


def test_what_would_have_to_be_upgraded_is_to_be_copied_first(database: Path) -> None:
    sql(database, "UPDATE alembic_version SET version_num = '0001'", "PRAGMA wal_checkpoint(TRUNCATE)")
    for command in ("ls", "doctor"):
        refused = mounted(database, command)
        assert refused.returncode == 2
        assert "copy it to a directory where you may write, and tokcap ls upgrades it" in one_line(refused.stderr)


def test_a_command_that_writes_is_refused_in_one_line(database: Path) -> None:
    refused = mounted(database, "delete", "open", "--yes")
    assert refused.returncode == 2
    assert one_line(refused.stderr).startswith("tokcap: cannot write")
    assert json.loads(mounted(database, "ls", "--json").stdout)[0]["calls"] == 3
