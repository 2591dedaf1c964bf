"""What a trainer stamps on calls of an engine that is silent about its weights: over real HTTP, with a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from support.made_up import BODY, CHAT, answering, chat
from support.replay import Gateway, running_gateway
from token_id_capture.store import TokenCaptureStore

STAMP = "/admin/weight-version"
HEADER = "x-tokcap-weight-version"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path / "captures.db") as running:
        running.engine.handler = answering(chat([5], [-0.1]))
        yield running


async def stamp(gateway: Gateway, body: Any) -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    answer = await gateway.request("POST", gateway.url + STAMP, raw, {"content-type": "application/json"})
    return answer.status, orjson.loads(answer.body)


async def versions(gateway: Gateway) -> dict[str, str | None]:
    listed = [one.rollout_id for one in await gateway.store.list_rollouts()]
    return {name: (await gateway.store.read_entries(name))[0].weight_version for name in listed}


async def test_calls_carry_what_was_stamped_when_they_ran(gateway: Gateway) -> None:
    await gateway.post(CHAT, BODY, "before")
    assert await stamp(gateway, {"version": "step-7"}) == (200, {"version": "step-7"})
    await gateway.post(CHAT, BODY, "after")
    await gateway.post(CHAT, BODY, "told", **{HEADER: "step-9"})
    assert await stamp(gateway, {"version": 8}) == (200, {"version": "8"})
    await gateway.post(CHAT, BODY, "later")
    assert await stamp(gateway, {"version": None}) == (200, {"version": None})
    await gateway.post(CHAT, BODY, "without")
    assert await versions(gateway) == {
        "after": "step-7",
        "before": None,
        "later": "8",
        "told": "step-9",
        "without": None,
    }
    sent = [name.lower() for one in gateway.engine.received for name, _ in one.headers]
    assert HEADER not in sent


async def test_what_the_engine_says_wins(gateway: Gateway) -> None:
    await stamp(gateway, {"version": "stamped"})
    said = chat([5], [-0.1])
    said["choices"][0]["weight_versions"] = [{"version": "said", "start": 0, "end": 1}]
    gateway.engine.handler = answering(said)
    await gateway.post(CHAT, BODY, "r", **{HEADER: "told"})
    assert await versions(gateway) == {"r": "said"}


async def test_a_call_during_which_the_stamp_changed_has_no_version(gateway: Gateway) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()
    answer = answering(chat([5], [-0.1]))

    async def slow(request: web.Request) -> web.StreamResponse:
        arrived.set()
        await go_on.wait()
        response: web.StreamResponse = await answer(request)
        return response

    gateway.engine.handler = slow
    await stamp(gateway, {"version": "old"})
    call = asyncio.create_task(gateway.post(CHAT, BODY, "r"))
    await arrived.wait()
    await stamp(gateway, {"version": "new"})
    go_on.set()
    await call
    assert await versions(gateway) == {"r": None}


@pytest.mark.parametrize("body", [b"", b"{", [], {}, {"version": ""}, {"version": ["x"]}, {"version": "x" * 201}])
async def test_a_stamp_that_cannot_be_read_changes_nothing(gateway: Gateway, body: Any) -> None:
    await stamp(gateway, {"version": "kept"})
    status, answer = await stamp(gateway, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    shown = await gateway.request("GET", gateway.url + STAMP)
    assert orjson.loads(shown.body) == {"version": "kept"}


def test_every_process_sees_the_stamp_and_only_its_owner_may_read_the_file(tmp_path: Path) -> None:
    here, there = TokenCaptureStore(tmp_path / "c.db"), TokenCaptureStore(tmp_path / "c.db")
    assert (here.weights.read(), there.weights.read()) == (None, None)
    for version in ("one", "two", None, "three"):
        here.weights.write(version)
        assert (here.weights.read(), there.weights.read()) == (version, version)
    assert (tmp_path / "c.db.weight-version").stat().st_mode & 0o777 == 0o600
    assert len([*tmp_path.iterdir()]) == 1


async def test_the_key_of_the_gateway_is_needed(tmp_path: Path) -> None:
    async with running_gateway(tmp_path / "captures.db", api_key="a-key-of-the-gateway") as running:
        assert (await running.request("POST", running.url + STAMP, b'{"version": "x"}')).status == 401
