"""Behind PgBouncer in transaction mode, where each transaction may have another session of the server."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from support.captured import entry
from support.postgres import PostgresServer
from token_id_capture.store import TokenCaptureStore

_LONGEST_START_SECONDS = 30.0


@contextmanager
def bouncer(postgres: PostgresServer, database: str, directory: Path) -> Iterator[str]:
    """The URL of a database behind PgBouncer, which has two sessions for all clients."""
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = directory / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n{database} = host={postgres.home} port={postgres.port} user=captures\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        "pool_mode = transaction\ndefault_pool_size = 2\n"
    )
    user, arguments = postgres.unprivileged(), [program, "-q", str(settings)]
    directory.chmod(0o755)
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL, **user) as process:
        try:
            url = f"postgresql://captures@127.0.0.1:{port}/{database}"
            deadline = time.monotonic() + _LONGEST_START_SECONDS
            while True:
                try:
                    psycopg.connect(url).close()
                    break
                except psycopg.OperationalError:
                    assert process.poll() is None
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            yield url
        finally:
            process.kill()


def test_stores_work_with_fewer_sessions_than_they_are(postgres: PostgresServer, postgres_url: str) -> None:
    name = postgres_url.partition("?")[0].rpartition("/")[2]
    with bouncer(postgres, name, postgres.home) as url:
        asyncio.run(_work(url))


async def _work(url: str) -> None:
    stores = [TokenCaptureStore(url) for _ in range(5)]
    for turn in range(4):
        await asyncio.gather(
            *(store.put(entry("r", f"{at}-{turn}", [turn], [at])) for at, store in enumerate(stores)),
            *(store.begin_call(f"r{at}", f"c{turn}") for at, store in enumerate(stores)),
            *(store.list_rollouts() for store in stores),
        )
    snapshot = await stores[0].freeze("r")
    assert len(snapshot.entries) == 20
    await stores[1].record_outcome(snapshot.snapshot_id, snapshot.version, "delivered")
    assert await stores[2].drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    detail = await stores[3].describe_rollout("r4")
    assert len(detail.intents) == 4
    for store in stores:
        await store.close()
