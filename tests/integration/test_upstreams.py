"""Several engines behind one gateway: who serves which rollout, and what becomes of calls when one dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from support.made_up import BODY, CHAT, STREAM, answering, chat
from support.replay import Gateway, ReplayEngine, replay_engine, running_gateway, until
from token_id_capture.errors import ConfigurationError
from token_id_capture.server.app import create_app
from token_id_capture.store import TokenCaptureStore

UPSTREAMS = "/admin/upstreams"
KEY = "key-of-the-operator"
MODELS = {"data": [{"id": "tiny", "owned_by": "vllm"}]}


@contextlib.asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[ReplayEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        found = [await stack.enter_async_context(replay_engine()) for _ in range(count)]
        for engine in found:
            engine.handler = serving_models(answering(chat([5], [-0.1])))
        yield found


def serving_models(calls: Any, models: Any = MODELS) -> Any:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response(models if request.path == "/v1/models" else {"status": "ok"})
        response: web.StreamResponse = await calls(request)
        return response

    return handler


@contextlib.asynccontextmanager
async def gateway_before(database: Path, upstreams: list[ReplayEngine], **options: Any) -> AsyncIterator[Gateway]:
    addresses = [engine.url for engine in upstreams]
    async with running_gateway(database, upstream=addresses, operator_key=KEY, **options) as gateway:
        yield gateway


def calls(engine: ReplayEngine) -> int:
    return sum(received.method == "POST" for received in engine.received)


async def served_by(gateway: Gateway, rollout: str) -> set[str | None]:
    return {call.upstream for call in (await gateway.store.describe_rollout(rollout)).calls}


async def changed(gateway: Gateway, method: str, body: Any, key: str = KEY) -> tuple[int, Any]:
    headers = {"content-type": "application/json", "x-api-key": key}
    raw = None if body is None else orjson.dumps(body)
    answer = await gateway.request(method, gateway.url + UPSTREAMS, raw, headers)
    return answer.status, orjson.loads(answer.body)


async def test_a_rollout_stays_with_one_engine_and_running_calls_are_shared(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    async with engines(3) as three, gateway_before(tmp_path / "c.db", three) as gateway:
        for engine in three:
            engine.handler = serving_models(answering(chat([5], [-0.1]), after=go_on))
        rollouts = [f"r{number}" for number in range(9)]
        first = [asyncio.create_task(gateway.post(CHAT, BODY, rollout)) for rollout in rollouts]

        async def all_there() -> bool:
            return sum(map(calls, three)) == 9

        await until(all_there)
        assert [calls(engine) for engine in three] == [3, 3, 3]
        go_on.set()
        assert {answer.status for answer in await asyncio.gather(*first)} == {200}
        for rollout in rollouts * 2:
            assert (await gateway.post(CHAT, BODY, rollout)).status == 200
        found = [await served_by(gateway, rollout) for rollout in rollouts]
    assert {len(one) for one in found} == {1}
    assert Counter(address for one in found for address in one) == {engine.url: 3 for engine in three}


async def test_another_process_sends_a_rollout_where_it_was_served_before(tmp_path: Path) -> None:
    async with engines(3) as three:
        for _ in range(3):
            async with gateway_before(tmp_path / "c.db", three) as gateway:
                for number in range(6):
                    await gateway.post(CHAT, BODY, f"r{number}")
                found = [await served_by(gateway, f"r{number}") for number in range(6)]
    assert {len(one) for one in found} == {1}


async def test_an_engine_that_dies_in_mid_call_costs_its_calls_and_nothing_else(tmp_path: Path) -> None:
    """As with one engine: what was in flight is flagged. Its rollouts go on elsewhere, and nobody sees an error."""
    first_part = b'data: {"id": "chat-1", "model": "tiny", "choices": [{"index": 0, "delta": {"content": "h"}}]}\n\n'

    async def dies(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first_part)
        assert request.transport is not None
        await kill.wait()
        request.transport.abort()
        return response

    kill = asyncio.Event()
    async with engines(2) as others, contextlib.AsyncExitStack() as life:
        doomed = await life.enter_async_context(replay_engine())
        doomed.handler = serving_models(answering(chat([5], [-0.1])))
        async with gateway_before(tmp_path / "c.db", [doomed, *others]) as gateway:
            for number in range(6):
                await gateway.post(CHAT, BODY, f"r{number}")
            mine = [f"r{n}" for n in range(6) if await served_by(gateway, f"r{n}") == {doomed.url}]
            rest = [f"r{n}" for n in range(6) if f"r{n}" not in mine]
            assert len(mine) == 2
            doomed.handler = serving_models(dies)
            lost = [asyncio.create_task(gateway.post(CHAT, STREAM, rollout)) for rollout in mine]

            async def begun() -> bool:
                return calls(doomed) >= 2 * len(mine)

            await until(begun)
            kill.set()
            assert {answer.whole for answer in await asyncio.gather(*lost)} == {False}
            await life.aclose()
            for rollout in (*mine, *rest) * 2:
                assert (await gateway.post(CHAT, BODY, rollout)).status == 200
            for rollout in mine:
                assert [reason for reason, _ in await gateway.flags(rollout)] == ["lost_stream"]
                assert len(await served_by(gateway, rollout)) == 2  # moved once, between calls
            for rollout in rest:
                assert (await gateway.flags(rollout), len(await served_by(gateway, rollout))) == ([], 1)
            status, told = await changed(gateway, "GET", None)
            assert (status, [one["up"] for one in told["upstreams"]]) == (200, [False, True, True])
            scraped = (await gateway.request("GET", f"{gateway.url}/metrics")).body.decode()
            for engine, up in ((doomed, 0.0), (others[0], 1.0), (others[1], 1.0)):
                assert f'tokcap_upstream_up{{upstream="{engine.url}"}} {up}\n' in scraped


async def test_a_call_that_no_engine_takes_is_refused_as_with_one(tmp_path: Path) -> None:
    async with engines(2) as two:
        addresses = [engine.url for engine in two]
    async with running_gateway(tmp_path / "c.db", upstream=addresses) as gateway:
        answer = await gateway.post(CHAT, BODY)
        assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (502, "upstream_unavailable")
        assert await gateway.intents() == ["refused"]
        assert (await gateway.request("GET", f"{gateway.url}/readyz")).status == 503


async def test_one_that_is_unhealthy_is_left_out_until_it_is_well(tmp_path: Path) -> None:
    async with engines(2) as two, gateway_before(tmp_path / "c.db", two) as gateway:

        async def ill(request: web.Request) -> web.StreamResponse:
            return web.Response(status=503)

        async def ups() -> list[bool]:
            return [one["up"] for one in (await changed(gateway, "GET", None))[1]["upstreams"]]

        well, two[0].handler = two[0].handler, ill

        async def is_out() -> bool:
            return await ups() == [False, True]

        await until(is_out)
        for number in range(4):
            assert (await gateway.post(CHAT, BODY, f"r{number}")).status == 200
        assert (calls(two[0]), calls(two[1])) == (0, 4)
        two[0].handler = well

        async def is_back() -> bool:
            return await ups() == [True, True]

        await until(is_back)


async def test_upstreams_are_added_and_removed_while_calls_run(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    async with engines(2) as (one, two), gateway_before(tmp_path / "c.db", [one]) as gateway:
        await gateway.post(CHAT, BODY, "before")
        status, told = await changed(gateway, "POST", {"url": f"{two.url}/v1"})
        assert (status, [each["url"] for each in told["upstreams"]]) == (200, [one.url, two.url])
        assert (await changed(gateway, "POST", {"url": two.url}))[1] == told
        one.handler = serving_models(answering(chat([5], [-0.1]), after=go_on))
        running = asyncio.create_task(gateway.post(CHAT, BODY, "before"))

        async def begun() -> bool:
            return calls(one) == 2

        await until(begun)
        status, told = await changed(gateway, "DELETE", {"url": one.url})
        assert (status, [each["url"] for each in told["upstreams"]]) == (200, [two.url])
        go_on.set()
        assert (await running).status == 200
        await gateway.post(CHAT, BODY, "before")
        assert [call.upstream for call in (await gateway.store.describe_rollout("before")).calls] == [
            *(one.url, one.url),
            two.url,
        ]
        status, told = await changed(gateway, "DELETE", {"url": two.url})
        assert (status, told["error"]["message"][:39]) == (400, "the last upstream cannot be removed: ad")


async def test_an_upstream_that_is_unlike_the_others_is_not_added(tmp_path: Path) -> None:
    async with engines(2) as (one, two), gateway_before(tmp_path / "c.db", [one], engine="vllm") as gateway:
        for models, said in (
            ({"data": [{"id": "other", "owned_by": "vllm"}]}, "it serves 'other', and the others 'tiny'"),
            ({"data": [{"id": "tiny", "owned_by": "sglang"}]}, "it is sglang, and this server reads vllm"),
        ):
            two.handler = serving_models(answering({}), models)
            status, told = await changed(gateway, "POST", {"url": two.url})
            assert (status, said in told["error"]["message"]) == (400, True), told
        for url, said in (
            ("http://127.0.0.1:9", "it does not answer"),
            ("nothing", "is not an upstream"),
            (5, "text"),
            (two.url.replace("://", "://user:hush@"), "contains a user or password"),
        ):
            status, told = await changed(gateway, "POST", {"url": url})
            assert (status, said in told["error"]["message"]) == (400, True), told
            assert "hush" not in told["error"]["message"]
        assert len((await changed(gateway, "GET", None))[1]["upstreams"]) == 1


async def test_only_the_operators_key_changes_upstreams(tmp_path: Path) -> None:
    async with engines(2) as (one, two):
        async with gateway_before(tmp_path / "c.db", [one], api_key="key-of-the-agents") as gateway:
            for key in ("key-of-the-agents", "", "wrong"):
                assert (await changed(gateway, "POST", {"url": two.url}, key))[0] == 401
                assert (await changed(gateway, "GET", None, key))[0] == 401
            assert (await gateway.request("GET", f"{gateway.url}/metrics", headers={"x-api-key": KEY})).status == 401
        async with running_gateway(tmp_path / "d.db", upstream=one.url) as gateway:
            assert (await changed(gateway, "POST", {"url": two.url}))[0] == 403
            assert len((await changed(gateway, "GET", None))[1]["upstreams"]) == 1
    with pytest.raises(ConfigurationError, match="key of the operator is that of the agents"):
        create_app("http://127.0.0.1:9", None, api_key=KEY, operator_key=KEY)
    with pytest.raises(ConfigurationError, match="--upstream"):
        create_app([], None)


async def test_the_processes_of_a_server_have_one_list(tmp_path: Path) -> None:
    """What one of them adds, the others have within seconds, and one that starts later too."""
    shared = tmp_path / "upstreams.json"
    async with (
        engines(2) as (one, two),
        gateway_before(tmp_path / "c.db", [one], shared_upstreams=shared) as here,
        gateway_before(tmp_path / "c.db", [one], shared_upstreams=shared) as there,
    ):
        await changed(here, "POST", {"url": two.url})

        async def known(gateway: Gateway) -> bool:
            return len((await changed(gateway, "GET", None))[1]["upstreams"]) == 2

        await until(lambda: known(there))
        async with gateway_before(tmp_path / "c.db", [one], shared_upstreams=shared) as later:
            await until(lambda: known(later))
        await changed(there, "DELETE", {"url": one.url})
        assert (await changed(here, "POST", {"url": one.url}))[0] == 200
        assert await known(here)


def test_the_store_knows_where_a_rollout_was_served_last(tmp_path: Path) -> None:
    async def asked() -> list[str | None]:
        async with TokenCaptureStore(tmp_path / "c.db") as store:
            return [await store.upstream_of("nobody")]

    assert asyncio.run(asked()) == [None]
