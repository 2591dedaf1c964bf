"""Two gateways that have the network in common and nothing else write one rollout on a server."""

from __future__ import annotations

import asyncio
import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from support.captured import until
from support.commands import TOKCAP
from support.postgres import running_server
from token_id_capture.store import TokenCaptureStore

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from torturing.network import Network, two_networks, why_not
from torturing.roles import Place
from torturing.server import let_in, place_of
from torturing.traffic import Engine

BODY = b'{"model": "policy", "messages": [{"role": "user", "content": "x"}]}'


@pytest.fixture
def networks() -> Iterator[list[Network]]:
    if reason := why_not():
        pytest.skip(reason)
    with two_networks() as made:
        yield made


def call(place: Place, rollout_id: str) -> int:
    connection = http.client.HTTPConnection(place.host, place.port, timeout=30)
    path = f"/ng-rollout/{rollout_id}/training-token-capture/v1/chat/completions"
    connection.request("POST", path, BODY, {"content-type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    return status


@contextmanager
def gateway(place: Place, engine: str, home: Path) -> Iterator[None]:
    """A gateway with a home, a directory and temporary files of its own, as on another machine."""
    home.mkdir()
    options = ["--upstream", engine, "--engine", "vllm", "--no-check", "--insecure"]
    process = subprocess.Popen(
        [
            *place.prefix,
            TOKCAP,
            "serve",
            *options,
            "--host",
            place.host,
            "--port",
            str(place.port),
            "-d",
            place.database,
        ],
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home)},
    )
    try:
        until(place.is_served, "the gateway to answer")
        yield
    finally:
        process.terminate()
        assert process.wait(30) == 0


def test_two_gateways_without_a_file_in_common_write_one_rollout(networks: list[Network], tmp_path: Path) -> None:
    with running_server() as server, ThreadingHTTPServer((networks[0].outside, 0), Engine) as engine:
        let_in(server, networks)
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        name = server.new_database()
        one, other = (place_of(network, networks[0], server, name) for network in networks)
        url = f"http://{one.engine_host}:{engine.server_port}"
        with gateway(one, url, tmp_path / "one"), gateway(other, url, tmp_path / "other"):
            assert [call((one, other)[number % 2], "math-0") for number in range(6)] == [200] * 6
        engine.shutdown()
        asyncio.run(assert_complete(server.url(name)))
        with server.admin(name) as admin:
            calls_of_writers = admin.execute("SELECT count(*) FROM entries GROUP BY writer_id").fetchall()
        assert calls_of_writers == [(3,), (3,)]


async def assert_complete(url: str) -> None:
    async with TokenCaptureStore(url) as store:
        detail = await store.describe_rollout("math-0")
        assert (len(detail.calls), detail.flags, detail.intents) == (6, (), ())
        assert not (await store.freeze("math-0")).incomplete
