"""Output that nobody takes: neither the log of a running server nor Ctrl-C waits for it."""

from __future__ import annotations

import array
import contextlib
import fcntl
import shutil
import signal
import sqlite3
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.commands import LONGEST_RUN_SECONDS, TOKCAP, clean_environment
from support.many_rollouts import database_with

SMALLEST_PIPE = 4096

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe can be chosen on Linux alone")


@contextlib.contextmanager
def unread(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """The command while it waits for somebody to read what it prints, of which there is more than a pipe holds."""
    with subprocess.Popen(
        [TOKCAP, *map(str, arguments)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pipesize=SMALLEST_PIPE,
    ) as process:
        try:
            until(lambda: waiting_in(process.stdout) > 0)
            yield process
        finally:
            process.kill()


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
def test_the_log_is_emptied_all_the_same(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, arguments: list[str]
) -> None:
    path = shutil.copy(database_with(4_000, tmp_path_factory), tmp_path / "captures.db")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as server:
        # The log is there before the command is, so that the command reads what the server commits.
        server.execute("UPDATE writers SET last_seen_at = last_seen_at + 1")
        with unread(*arguments, "-d", path) as process:
            server.execute("UPDATE writers SET last_seen_at = last_seen_at + 1")
            until(lambda: server.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
            assert process.poll() is None


@pytest.mark.parametrize(
    "arguments", [["ls", "--limit", "70"], ["ls", "--json"], ["ls", "--limit", "4000"], ["show", "zz-long"]]
)
def test_ctrl_c_ends_the_command_without_a_word(tmp_path_factory: pytest.TempPathFactory, arguments: list[str]) -> None:
    # Of the first, the last bytes are all that is left to write: they wait until the very end.
    with unread(*arguments, "-d", database_with(4_000, tmp_path_factory)) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(LONGEST_RUN_SECONDS) == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
