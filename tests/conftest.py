"""What tests of every kind share."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import hypothesis
import pytest

from support.commands import LONGEST_RUN_SECONDS, TOKCAP, RunInstalled, RunTokcap, clean_environment
from support.interrupts import listen_to_interrupts
from support.postgres import PostgresServer, running_server

# A shared machine may stall at any point of a test; a deadline for an example would only find that.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")


REPEATING = {
    "test_builder_reference",
    "test_continuity_templates",
    "test_damaged_replies",
    "test_dialect_streams",
    "test_engine_recordings",
    "test_engines",
    "test_reply_body",
    "test_testing_policy",
}
"""Tests that do one thing with very many inputs."""


def pytest_configure() -> None:
    """What a program inherits as ignored stays ignored, and with it in every child that a test interrupts."""
    listen_to_interrupts()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Trace what is quick: traced code takes twice as long.

    Property tests repeat what others reach, and tests of whole programs run them in processes of their own.
    """
    for item in items:
        whole_program = item.path.parent.name in ("browser", "crash", "integration", "postgres")
        if whole_program or item.path.stem in REPEATING or item.get_closest_marker("hypothesis"):
            item.add_marker("no_cover")


@pytest.fixture
def tokcap(fork_server: socket.socket) -> RunTokcap:
    """Run the command as a user does, without a terminal, and return what it printed."""

    def run(
        *arguments: object, stdin: str | bytes = "", env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        given_arguments = [str(argument) for argument in arguments]
        request = {
            "arguments": given_arguments,
            "environment": {**clean_environment(), **(env or {})},
            "directory": os.getcwd(),
        }
        # Files, not pipes: nobody has to read them while the command runs.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin.encode() if isinstance(stdin, str) else stdin)
            given.seek(0)
            streams = [given.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(fork_server, [json.dumps(request).encode()], streams)
            code = json.loads(fork_server.recv(64))
            return subprocess.CompletedProcess(given_arguments, code, _text(out), _text(err))

    return run


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(LONGEST_RUN_SECONDS)
    program = Path(__file__).with_name("support") / "fork_server.py"
    arguments = [sys.executable, str(program), str(theirs.fileno())]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    server = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    with server, ours:
        yield ours
        ours.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for all tests of this process. Who stops it starts it again."""
    with running_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """The URL of a database with the tables of a store that nobody has written to."""
    with postgres.captures() as url:
        yield url


@pytest.fixture
def run_installed() -> RunInstalled:
    """Run the installed script itself; arguments of ``subprocess.run`` may follow."""

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[bytes]:
        settings = {"env": clean_environment(), "timeout": LONGEST_RUN_SECONDS, "check": False, **options}
        return subprocess.run([TOKCAP, *map(str, arguments)], **settings)  # type: ignore[call-overload,no-any-return]

    return run


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named after their parameter: compressed ones hold the time, so that two processes would collect
    different tests."""
    return argname if isinstance(val, bytes) else None
