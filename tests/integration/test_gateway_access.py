"""Who may call, how many at once, and what an operator asks: over real HTTP, in front of a real store."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from aiohttp import web

from support.made_up import BODY, CHAT, FIRST, STREAM, answering, chat, delta, events, usage
from support.replay import Gateway, running_gateway, stream, until
from token_id_capture.server.http.metrics import OUTCOMES
from token_id_capture.server.http.readiness import Readiness, Why
from token_id_capture.store import TokenCaptureStore

KEY = "writer lock-key-5f1e"
ENGINE_KEY = "engine-key-77aa"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path, api_key=KEY) as running:
        running.engine.handler = answering(chat([5], [-0.1]))
        yield running


def forwarded(gateway: Gateway) -> list[tuple[str, str]]:
    """The credentials that the engine got with the latest request."""
    received = [(name.lower(), value) for name, value in gateway.engine.received[-1].headers]
    return [(name, value) for name, value in received if name in ("authorization", "x-api-key", "x-other")]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer other"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer"},
        {"x-api-key": ""},
        {"x-api-key": KEY.upper()},
        {"x-other": KEY},
    ],
)
async def test_a_call_without_the_key_reaches_neither_engine_nor_store(
    gateway: Gateway, headers: dict[str, str]
) -> None:
    for path in (CHAT, "/v1/inference", "/v1/models", "/healthz"):
        response = await gateway.post(path, BODY, **headers)
        assert response.status == 401
        assert ("www-authenticate", "Bearer") in [(name.lower(), value) for name, value in response.headers]
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
        assert KEY not in error["message"]
    assert (await gateway.request("GET", gateway.url + "/metrics", headers=headers)).status == 401
    assert gateway.engine.received == []
    assert await gateway.store.list_rollouts() == []


@pytest.mark.parametrize(
    ("headers", "left"),
    [
        ({"authorization": f"Bearer {KEY}"}, []),
        ({"Authorization": f"bearer   {KEY} "}, []),
        ({"x-api-key": KEY}, []),
        ({"X-Api-Key": KEY, "authorization": "Bearer mine"}, [("authorization", "Bearer mine")]),
        ({"authorization": f"Bearer {KEY}", "x-api-key": "mine"}, [("x-api-key", "mine")]),
        ({"authorization": f"Bearer {KEY}", "x-api-key": KEY, "x-other": KEY}, []),
        ({"x-api-key": KEY, "x-other": f"Bearer {KEY}"}, []),
    ],
)
async def test_the_key_opens_the_gateway_and_goes_no_further(
    gateway: Gateway, headers: dict[str, str], left: list[tuple[str, str]]
) -> None:
    assert (await gateway.post(CHAT, BODY, **headers)).status == 200
    assert forwarded(gateway) == left
    assert KEY not in (await gateway.entry()).model_dump_json()


async def test_official_clients_show_what_is_wrong(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.base() + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="The gateway's API key is missing or wrong"):
            await client.models.list()
    async with openai.AsyncOpenAI(base_url=gateway.base() + "/v1", api_key=KEY, max_retries=0) as client:
        completion = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert completion.choices[0].message.content == "hi"


async def test_the_engines_key_replaces_what_the_client_sent(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, upstream_api_key=ENGINE_KEY) as gateway:
        gateway.engine.handler = answering(chat([5], [-0.1]))
        for path in (CHAT, "/v1/inference"):
            await gateway.post(path, BODY, authorization="Bearer client", **{"x-api-key": "client"})
            assert forwarded(gateway) == [("authorization", f"Bearer {ENGINE_KEY}")]
        # It cannot be talked away either.
        await gateway.post(CHAT, BODY, connection="keep-alive, authorization")
        assert forwarded(gateway) == [("authorization", f"Bearer {ENGINE_KEY}")]


async def test_without_any_key_the_clients_own_is_the_engines_to_judge(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        gateway.engine.handler = answering(chat([5], [-0.1]))
        await gateway.post(CHAT, BODY, authorization="Bearer client", **{"x-api-key": "client"})
        assert forwarded(gateway) == [("authorization", "Bearer client"), ("x-api-key", "client")]


async def test_probes_need_no_key_and_exist_at_the_root_alone(gateway: Gateway) -> None:
    for path, status in (("/healthz", "ok"), ("/readyz", "ready")):
        response = await gateway.request("GET", gateway.url + path)
        assert (response.status, response.json()) == (200, {"status": status})
        assert (await gateway.request("HEAD", gateway.url + path)).body == b""
        assert (await gateway.request("POST", gateway.url + path, b"{}")).status == 405
    key = {"x-api-key": KEY}
    metrics = await gateway.request("GET", gateway.url + "/metrics", headers=key)
    assert dict(metrics.headers)["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert gateway.engine.received == []
    gateway.engine.handler = answering({"whose": "engine"})
    for path in ("/healthz", "/readyz", "/metrics"):
        for base in (gateway.base(), gateway.url + "/ng-rollout/r1"):
            assert (await gateway.request("GET", base + path, headers=key)).json() == {"whose": "engine"}
            assert gateway.engine.received[-1].target == path


async def test_it_is_not_ready_without_its_engine_or_its_database(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        upstream = f"http://127.0.0.1:{taken.getsockname()[1]}"
    full = TokenCaptureStore(tmp_path, free_space_floor=2**62)
    async with running_gateway(tmp_path, store=full, upstream=upstream) as gateway:
        for _ in range(3):
            response = await gateway.request("GET", gateway.url + "/readyz")
            assert (response.status, response.json()) == (
                503,
                {
                    "status": "not ready",
                    "problems": ["upstream", "database"],
                    "why": {"upstream": "unreachable", "database": "no_space"},
                },
            )
        assert (await gateway.request("GET", gateway.url + "/healthz")).status == 200
    # Said once, not for each who asks.
    warned = [record.getMessage() for record in caplog.records if "not ready" in record.getMessage()]
    assert len(warned) == 2
    assert any("fewer than the floor" in message for message in warned)


async def test_however_often_it_is_asked_the_engine_is_connected_once_a_second() -> None:
    asked: list[float] = []
    loop = asyncio.get_running_loop()

    async def reach() -> None:
        asked.append(loop.time())
        await asyncio.sleep(0)
        if len(asked) == 1:
            raise ConnectionRefusedError("not yet")

    readiness = Readiness(None, reach)
    assert await asyncio.gather(*(readiness.problems() for _ in range(50))) == [{"upstream": Why.UNREACHABLE}] * 50
    assert len(asked) == 1

    async def ready() -> bool:
        return not await readiness.problems()

    await until(ready)
    assert len(asked) == 2
    assert asked[1] - asked[0] >= 0.9


@contextlib.asynccontextmanager
async def holding(database: Path, **options: Any) -> AsyncIterator[tuple[Gateway, asyncio.Event]]:
    """A gateway whose engine holds streams until the event is set."""
    go_on = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response()
        await go_on.wait()
        return await stream(request, events(FIRST, delta([10], "stop"), usage(1)))

    async with running_gateway(database, **options) as gateway:
        gateway.engine.handler = handler
        try:
            yield gateway, go_on
        finally:
            go_on.set()


async def test_a_call_too_many_is_told_so_and_leaves_no_trace(tmp_path: Path) -> None:
    async with holding(tmp_path, max_concurrent_calls=2) as (gateway, go_on):
        running = [asyncio.create_task(gateway.post(CHAT, STREAM, f"r{number}")) for number in range(2)]

        async def both_sent() -> bool:
            return len(gateway.engine.received) == 2

        await until(both_sent)
        for path in (CHAT, "/v1/inference"):
            response = await gateway.post(path, STREAM, "r9")
            assert response.status == 503
            assert dict(response.headers)["retry-after"] == "5"
            assert response.json()["error"]["code"] == "too_many_calls"
            assert "already serves 2 calls at once" in response.json()["error"]["message"]
        # Traffic of no rollout shares the engine, and so the limit; what generates nothing does not.
        assert (await gateway.request("POST", gateway.url + CHAT, orjson.dumps(BODY))).status == 503
        assert (await gateway.request("GET", gateway.base("r9") + "/v1/models")).status == 200
        assert [rollout.rollout_id for rollout in await gateway.store.list_rollouts()] == ["r0", "r1"]
        async with openai.AsyncOpenAI(base_url=gateway.base() + "/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="already serves 2 calls"):
                await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        go_on.set()
        assert [response.status for response in await asyncio.gather(*running)] == [200, 200]
        assert (await gateway.post(CHAT, STREAM, "r9")).status == 200
        assert await metric(gateway, 'tokcap_calls_total{outcome="overloaded",reason=""}') == 3
        assert await metric(gateway, "tokcap_calls_in_flight") == 0


async def test_a_call_whose_client_left_counts_until_it_is_drained(tmp_path: Path) -> None:
    async with holding(tmp_path, max_concurrent_calls=1) as (gateway, go_on):

        async def sent() -> bool:
            return len(gateway.engine.received) == 1

        async with aiohttp.ClientSession() as session:
            asking = asyncio.ensure_future(session.post(gateway.base() + CHAT, json=STREAM))
            await until(sent)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert (await gateway.post(CHAT, STREAM)).status == 503
        go_on.set()

        async def free() -> bool:
            return (await gateway.post(CHAT, STREAM)).status == 200

        await until(free)


async def metric(gateway: Gateway, name: str) -> float:
    """The value of one sample."""
    text = (await gateway.request("GET", gateway.url + "/metrics")).body.decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


async def test_what_became_of_calls_is_counted_under_bounded_labels(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        gateway.engine.handler = answering(chat([5], [-0.1]))
        await gateway.post(CHAT, BODY)
        two = chat([5], [-0.1], 2)
        two["choices"].append({**two["choices"][0], "index": 1})
        gateway.engine.handler = answering(two)
        await gateway.post(CHAT, {**BODY, "n": 2}, "two-choices")
        await gateway.post("/v1/inference", BODY)
        gateway.engine.handler = answering({"error": "no"}, 400)
        await gateway.post(CHAT, BODY)
        gateway.engine.handler = answering({"error": "no"}, 500)
        await gateway.post(CHAT, BODY)
        gateway.engine.handler = answering(chat([5, 6], [-0.1]))
        await gateway.post(CHAT, BODY)
        await gateway.store.freeze("r1")
        await gateway.post(CHAT, BODY)
        counted = {
            (outcome, reason): float(value)
            for outcome, reason, value in re.findall(
                r'tokcap_calls_total{outcome="(\w+)",reason="(\w*)"} (\S+)',
                (await gateway.request("GET", gateway.url + "/metrics")).body.decode(),
            )
        }
        assert {key: value for key, value in counted.items() if value} == {
            ("captured", ""): 2,
            ("uncaptured", ""): 1,
            ("refused", ""): 1,
            ("marked", "unknown_outcome"): 1,
            ("marked", "token_count_mismatch"): 1,
            ("closed", ""): 1,
        }
        assert await metric(gateway, "tokcap_calls_begun_total") == 6
        assert await metric(gateway, "tokcap_put_seconds_count") == 3
        assert await metric(gateway, "tokcap_wal_bytes") > 0
        assert await metric(gateway, "tokcap_store_queue_jobs") == 0
        text = (await gateway.request("GET", gateway.url + "/metrics")).body.decode()
        assert "r1" not in text
        assert "two-choices" not in text

        async def looked() -> bool:
            return await metric(gateway, "tokcap_event_loop_lag_seconds_count") > 0

        await until(looked)


async def test_every_number_and_outcome_is_documented(gateway: Gateway) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operation.md").read_text("utf-8")
    text = (await gateway.request("GET", gateway.url + "/metrics", headers={"x-api-key": KEY})).body.decode()
    described = set(re.findall(r"`(tokcap_\w+)`", page))
    # Outside of tokcap serve, prometheus_client also tells when each counter was made.
    assert {name for name in re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE) if "_created" not in name} == described
    assert re.findall(r"^\| `(\w+)` \| [^|]+\|$", page.partition("| `outcome` |")[2], re.MULTILINE) == list(OUTCOMES)
