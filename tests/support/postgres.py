"""A PostgreSQL server of the tests' own: Debian's package, or whatever ``pg_config`` knows."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql

from token_id_capture.store import TokenCaptureStore

PASSWORD: Final = "a-secret-that-nothing-prints"
"""Of the user ``captures``, who needs it on TCP; the socket trusts whoever may reach it."""

_LONGEST_START_SECONDS: Final = 60.0
_SETTINGS: Final = {
    "max_connections": "100",
    "shared_buffers": "64MB",
    "max_wal_senders": "0",
    "wal_level": "minimal",
    "log_min_messages": "fatal",
    # Seconds less after a crash than one fsync for each file.
    "recovery_init_sync_method": "syncfs",
}
_names = itertools.count()


def programs() -> Path:
    """The folder of ``initdb`` and ``postgres``."""
    config = shutil.which("pg_config")
    told = [subprocess.check_output([config, "--bindir"], text=True).strip()] if config else []
    usual = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    for folder in (*map(Path, told), *usual):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise FileNotFoundError("PostgreSQL is not installed: apt-get install postgresql, or put pg_config on the PATH")


class PostgresServer:
    """One server, which listens on a socket and on 127.0.0.1. Databases of tests are copies of a template."""

    def __init__(self, home: Path, owner: pwd.struct_passwd | None) -> None:
        """``owner`` runs the server where this process is root, which PostgreSQL refuses."""
        self.home = home
        self._owner = owner
        self._programs = programs()
        self._spare: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def create(self) -> None:
        """Make its files, with a language's order of text, so that nothing relies on the order of bytes."""
        secret = self.home / "password"
        secret.write_text(PASSWORD)
        if self._owner is not None:
            os.chown(secret, self._owner.pw_uid, self._owner.pw_gid)
        arguments = [self._programs / "initdb", "-D", self.home / "data", "-U", "captures", "--no-sync"]
        arguments += ["--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={secret}", "--encoding=UTF8"]
        self._run(*arguments, "--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US")

    def start(self, **settings: str) -> None:
        """Start it and wait until it answers; it ends with the thread that calls this."""
        arguments = [str(self._programs / "postgres"), "-D", str(self.home / "data"), "-k", str(self.home)]
        arguments += ["-p", str(self.port), "-c", "listen_addresses=127.0.0.1"]
        arguments += [word for name, value in {**_SETTINGS, **settings}.items() for word in ("-c", f"{name}={value}")]
        self._process = subprocess.Popen(
            arguments,
            cwd=self.home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
            **self.unprivileged(),
        )
        deadline = time.monotonic() + _LONGEST_START_SECONDS
        while True:
            try:
                self.admin().close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def stop(self, mode: str = "fast") -> None:
        """Stop it: ``fast`` in order, ``immediate`` as a loss of power of the server process would."""
        if self._process is not None:
            self._process.send_signal({"fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])
            self._process.wait(_LONGEST_START_SECONDS)
            self._process = None

    @property
    def pid(self) -> int:
        """The process that starts the others."""
        assert self._process is not None
        return self._process.pid

    def processes(self) -> list[int]:
        """The server's processes except the one that starts the others: those that serve a connection, and its own."""
        return [int(child) for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def admin(self, database: str = "postgres") -> psycopg.Connection[Any]:
        """A connection of the tests' own, which commits each statement."""
        return psycopg.connect(self.url(database), autocommit=True)

    def url(self, database: str, *, tcp: bool = False) -> str:
        """The URL of a database, over the socket or, with a password in it, over TCP."""
        if tcp:
            return f"postgresql://captures:{PASSWORD}@127.0.0.1:{self.port}/{database}"
        return f"postgresql://captures@/{database}?host={self.home}&port={self.port}"

    def new_database(self) -> str:
        """The name of a new database without any table of ours."""
        name = f"test_{next(_names)}"
        with self.admin() as admin:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return name

    @contextmanager
    def captures(self) -> Iterator[str]:
        """The URL of a database with the tables of a store, all empty. It is emptied for the next test: that takes
        milliseconds, and to create one a tenth of a second."""
        name = self._spare.pop() if self._spare else self._with_tables()
        yield self.url(name)
        with self.admin(name) as admin:
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> %s",
                          [name, admin.info.backend_pid])  # fmt: skip
            tables = [row[0] for row in admin.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]
            emptied = [f"DELETE FROM {table};" for table in tables if table not in ("alembic_version", "capture_file")]
            # Triggers keep evidence, and foreign keys want an order.
            admin.execute(f"BEGIN; SET LOCAL session_replication_role = replica; {' '.join(emptied)} COMMIT".encode())
        self._spare.append(name)

    def _with_tables(self) -> str:
        async def create(url: str) -> None:
            async with TokenCaptureStore(url):
                pass

        name = self.new_database()
        asyncio.run(create(self.url(name)))
        return name

    def unprivileged(self) -> dict[str, Any]:
        """What has ``subprocess`` run a program as the user of the server, which is never root."""
        if self._owner is None:
            return {}
        return {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}

    def _run(self, *arguments: object) -> None:
        done = subprocess.run(
            [str(word) for word in arguments], cwd=self.home, capture_output=True, text=True, **self.unprivileged()
        )
        assert done.returncode == 0, done.stderr


def _end_with_parent() -> None:
    """Have the server stop where the tests are killed, and cannot stop it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGQUIT)  # PR_SET_PDEATHSIG


@contextmanager
def running_server() -> Iterator[PostgresServer]:
    """A server that ends with the block, and leaves no file behind."""
    owner = None
    if os.geteuid() == 0:
        known = {user.pw_name: user for user in pwd.getpwall()}
        owner = known.get("postgres") or known["nobody"]
    # Not below pytest's folder, which nobody else may enter; and a socket's path must be short.
    home = Path(tempfile.mkdtemp(prefix="tokcap-pg-"))
    if owner is not None:
        os.chown(home, owner.pw_uid, owner.pw_gid)
    server = PostgresServer(home, owner)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.stop("immediate")
        shutil.rmtree(home)
