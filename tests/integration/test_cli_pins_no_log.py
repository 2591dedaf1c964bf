"""A reader whose output waits must not keep the write-ahead log of a running server from shrinking."""

from __future__ import annotations

import array
import contextlib
import fcntl
import shutil
import sqlite3
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from many_rollouts import database_with

from commands import LONGEST_RUN_SECONDS, TOKCAP, clean_environment

SMALLEST_PIPE = 4096

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe can be chosen on Linux alone")


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "--limit", "4000"],
        ["show", "zz-long"],
        ["sql", "SELECT * FROM rollout_overview"],
        ["export", "--output", "-"],
        ["export", "--output", "-", "--per-request"],
    ],
    ids=" ".join,
)
def test_what_nobody_takes_from_a_command_does_not_keep_the_log_from_being_emptied(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, arguments: list[str]
) -> None:
    path = shutil.copy(database_with(4_000, tmp_path_factory), tmp_path / "captures.db")
    command = [TOKCAP, *arguments, "--database", path]
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as server:
        # The log is there before the command is, so that the command reads what the server commits.
        server.execute("UPDATE writers SET last_seen_at = last_seen_at + 1")
        with subprocess.Popen(
            command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as run:
            try:
                assert run.stdout is not None
                fcntl.fcntl(run.stdout, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE)
                until(lambda: waiting_in(run.stdout) > 0)
                server.execute("UPDATE writers SET last_seen_at = last_seen_at + 1")
                until(lambda: server.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
                assert run.poll() is None
            finally:
                run.kill()


def waiting_in(pipe: object) -> int:
    """How many bytes of a pipe nobody has read."""
    size = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, size)  # type: ignore[call-overload]
    return size[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_RUN_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
