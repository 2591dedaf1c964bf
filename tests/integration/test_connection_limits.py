"""Connections before there is a request: how long they may be silent, and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.replay import serving as serving_app
from support.served import serving
from token_id_capture.cli.serving.connections import limited_protocol
from token_id_capture.cli.serving.logs import log_to_stderr
from token_id_capture.server.http.upstream import Upstream, UpstreamError

HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def limited(seconds: float, most: int) -> AsyncIterator[int]:
    async with serving_app(app, http=limited_protocol(seconds, most)) as (url, _):
        yield int(url.rpartition(":")[2])


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(10):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def answered(port: int) -> bytes:
    async with connected(port) as (reader, writer):
        writer.write(HEAD + b"connection: close\r\n\r\n")
        return await rest_of(reader)


@pytest.mark.parametrize("sent", [b"", b"GET /", HEAD, HEAD + b"\r\n" + HEAD])
async def test_a_connection_that_does_not_end_its_head_is_closed(sent: bytes) -> None:
    async with limited(0.2, 100) as port, connected(port) as (reader, writer):
        writer.write(sent)
        response = await rest_of(reader)
        assert response.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\n")


async def test_a_target_with_a_fragment_is_an_invalid_request() -> None:
    async with limited(30.0, 100) as port, connected(port) as (reader, writer):
        writer.write(b"GET /v1/chat/completions#/tokenize HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 400")


async def test_bytes_that_trickle_in_do_not_extend_the_time_for_a_head() -> None:
    async with limited(0.3, 100) as port, connected(port) as (reader, writer):
        writer.write(HEAD + b"x: ")
        closed = asyncio.create_task(rest_of(reader))
        while not closed.done():
            writer.write(b"a")
            await asyncio.sleep(0.02)
        assert await closed == b""


async def test_a_connection_that_is_kept_alive_is_not_taken_for_a_silent_one() -> None:
    async with limited(0.1, 100) as port, connected(port) as (reader, writer):
        for _ in range(2):
            writer.write(HEAD + b"\r\n")
            async with asyncio.timeout(10):
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.2)  # longer than a head may take


async def test_a_head_without_end_is_cut_off() -> None:
    async with limited(30.0, 100) as port, connected(port) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(b"GET / HTTP/1.1\r\nx: ")
            for _ in range(40):
                writer.write(b"a" * 100_000)
                await writer.drain()
        assert not (await rest_of(reader)).startswith(b"HTTP/1.1 200")


async def test_silent_connections_never_keep_a_request_out() -> None:
    async with limited(30.0, 4) as port, contextlib.AsyncExitStack() as silent:
        for _ in range(20):
            await silent.enter_async_context(connected(port))
        for _ in range(3):
            assert (await answered(port)).startswith(b"HTTP/1.1 200")


async def test_beyond_the_limit_of_connections_in_use_a_503_says_so() -> None:
    async with limited(30.0, 2) as port, connected(port) as one, connected(port) as other:
        for reader, writer in (one, other):
            writer.write(HEAD + b"\r\n")
            async with asyncio.timeout(10):
                await reader.readuntil(b"ok")
        assert (await answered(port)).startswith(b"HTTP/1.1 503")


async def test_the_server_closes_silent_connections_and_serves_on(tmp_path: Path) -> None:
    async with serving(tmp_path / "c.db", "http://127.0.0.1:9", TOKCAP_HEAD_TIMEOUT="0.2") as server:
        async with connected(int(server.url.rpartition(":")[2])) as (reader, _):
            assert await rest_of(reader) == b""
        assert (await server.get("/healthz"))[0] == 200


async def test_without_files_for_a_connection_to_the_engine_a_call_is_a_503() -> None:
    upstream = Upstream("http://127.0.0.1:9")

    async def refuse(*arguments: Any, **options: Any) -> Any:
        key = aiohttp.client_reqrep.ConnectionKey("127.0.0.1", 9, False, True, None, None, None)
        raise aiohttp.ClientConnectorError(key, OSError(errno.EMFILE, "Too many open files"))

    scope = {"method": "POST", "path": "/", "headers": [], "query_string": b""}
    async with aiohttp.ClientSession() as session:
        session._connector.connect = refuse  # type: ignore[union-attr,method-assign]
        upstream._session = session
        with pytest.raises(UpstreamError) as refused:
            async with upstream.open(scope, b"", plain=True):
                pass
    assert (refused.value.status, refused.value.sent) == (503, False)
    assert "127.0.0.1" not in refused.value.told


def test_what_anybody_can_cause_is_logged_once_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        log_to_stderr("text")
        for _ in range(50):
            logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    assert capsys.readouterr().err.count("Invalid HTTP request") <= 2
