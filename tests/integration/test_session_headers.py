"""The session headers of calls of which no entry is stored."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.commands import RunTokcap
from support.made_up import BODY, CHAT, answering, chat
from support.replay import Gateway, running_gateway, until

HEADERS = {"X-Session-Id": "s1", "x-agent": "not kept"}
KEPT = {"x-session-id": "s1"}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


def selected(gateway: Gateway, statement: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(gateway.store.database)
    try:
        found = connection.execute(statement).fetchall()
    finally:
        connection.close()
    return [(*others, json.loads(headers)) for *others, headers in found]


def refusing(status: int) -> Any:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=status)

    return handler


async def test_a_refused_call_keeps_its_session_headers(gateway: Gateway) -> None:
    gateway.engine.handler = refusing(400)
    assert (await gateway.post(CHAT, BODY, **HEADERS)).status == 400
    assert selected(gateway, "SELECT outcome, session_headers FROM call_intents") == [("refused", KEPT)]


async def test_a_body_that_cannot_be_read_keeps_its_session_headers(gateway: Gateway) -> None:
    gateway.engine.handler = answering(chat([5], [-0.1]))
    await gateway.post(CHAT, b"{", **HEADERS)
    assert selected(gateway, "SELECT reason, session_headers FROM incomplete_flags") == [("uncaptured_endpoint", KEPT)]


async def test_a_flagged_call_keeps_its_session_headers_in_the_snapshot_and_in_show(
    gateway: Gateway, tokcap: RunTokcap
) -> None:
    gateway.engine.handler = refusing(500)
    await gateway.post(CHAT, BODY, **HEADERS)
    await gateway.store.freeze("r1")
    for table in ("incomplete_flags", "snapshot_flags"):
        found = selected(gateway, f"SELECT DISTINCT session_headers FROM {table}")
        assert found == [(KEPT,)]
    lines = tokcap("show", "r1", "-d", gateway.store.database).stdout.splitlines()
    assert lines[lines.index("session headers of intents") + 2].split()[1:] == ["x-session-id", "s1"]
    shown = json.loads(tokcap("show", "r1", "-d", gateway.store.database, "--json").stdout)
    assert {flag["origin"]["session_headers"]["x-session-id"] for flag in shown["flags"]} == {"s1"}


async def test_a_lost_call_keeps_its_session_headers_after_the_client_has_gone(gateway: Gateway) -> None:
    silent = asyncio.Event()
    gateway.engine.handler = answering(chat([5], [-0.1]), after=silent)
    asking = asyncio.create_task(gateway.post(CHAT, BODY, **HEADERS))

    async def begun() -> Any:
        return selected(gateway, "SELECT session_headers FROM lost_calls")

    assert await until(begun) == [(KEPT,)]
    asking.cancel()
    await gateway.store.freeze("r1")
    assert selected(gateway, "SELECT reason, session_headers FROM snapshot_flags") == [("call_lost", KEPT)]
    silent.set()
