"""Streams through the gateway: chunk boundaries, time, clients that hang up, and the server's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from support.made_up import BODY, CHAT, FIRST, STREAM, answering, chat, delta, events, streaming, usage
from support.replay import Gateway, Recording, connector_to, running_gateway, until
from token_id_capture.provenance import HistoryLink
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing.replay import Cut, bytewise, in_chunks, whole

SPLIT_CHARACTER = "字é🙂"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


class LockedStore(TokenCaptureStore):
    """A store whose ``put`` waits to be let through."""

    def __init__(self, database: Path) -> None:
        super().__init__(database)
        self.arrived, self.released = asyncio.Event(), asyncio.Event()

    async def put(self, entry: TokenEntry, history: HistoryLink | None = None) -> None:
        self.arrived.set()
        await self.released.wait()
        await super().put(entry, history)


class SteppedEngine:
    """Streams one event for each ``step``, after ``free`` ones, and remembers how its responses ended."""

    def __init__(self, chunks: Iterable[bytes], free: int) -> None:
        self.chunks, self.free = list(chunks), free
        self.steps = asyncio.Semaphore(0)
        self.ends: list[str] = []

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.steps.release()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await response.prepare(request)
            for number, chunk in enumerate(self.chunks):
                if number >= self.free:
                    await self.steps.acquire()
                await response.write(chunk)
            await response.write_eof()
        except OSError as error:
            self.ends.append(type(error).__name__)
        else:
            self.ends.append("whole")
        return response


def stepped(gateway: Gateway, chunks: Iterable[bytes], free: int = 0) -> SteppedEngine:
    engine = SteppedEngine(chunks, free)
    gateway.engine.handler = engine
    return engine


async def stored(gateway: Gateway, count: int = 1) -> tuple[TokenEntry, ...]:
    async def there() -> tuple[TokenEntry, ...]:
        entries = await gateway.store.read_entries("r1")
        return entries if len(entries) >= count else ()

    entries: tuple[TokenEntry, ...] = await until(there)
    return entries


@pytest.mark.parametrize("cut", [bytewise, in_chunks(7, longest=90)], ids=["bytewise", "in chunks"])
@pytest.mark.parametrize(
    ("end", "space"),
    [(b"\n", b" "), (b"\r\n", b""), (b"\r", b""), (b"\r\n", b" ")],
    ids=["lf", "crlf-tight", "cr", "crlf"],
)
async def test_chunks_line_ends_and_spaces_change_neither_the_entry_nor_the_clients_bytes(
    gateway: Gateway, cut: Cut, end: bytes, space: bytes
) -> None:
    def spelled(frames: Iterable[bytes]) -> bytes:
        lines = b"".join(frames).replace(b"data: ", b"data:" + space)
        return b": hello" + end + end + lines.replace(b"\n", end)

    first, second = delta([10]), delta([11, 12], "stop")
    first["choices"][0]["delta"]["content"] = SPLIT_CHARACTER
    written = [orjson.dumps(part) for part in (FIRST, first, second, usage(3))]
    sent = spelled(b"data: " + text + b"\n\n" for text in (*written, b"[DONE]"))
    gateway.engine.handler = streaming(*cut(sent))
    response = await gateway.post(CHAT, {**STREAM, "stream_options": {"include_usage": True}})
    hidden = [_nulled(part) for part in (FIRST, first, second, usage(3))]
    assert response.body == spelled(b"data: " + text + b"\n\n" for text in (*hidden, b"[DONE]"))
    entry = await gateway.entry()
    assert entry.generation_token_ids == [10, 11, 12]
    assert entry.output_items[0]["content"] == "x" + SPLIT_CHARACTER + "x"


def _nulled(part: dict[str, Any]) -> bytes:
    copied = orjson.loads(orjson.dumps(part))
    for holder in (copied, *copied["choices"]):
        for name in ("token_ids", "prompt_token_ids", "logprobs"):
            if name in holder:
                holder[name] = None
    return orjson.dumps(copied)


async def test_recorded_streams_give_the_same_entry_byte_by_byte(gateway: Gateway) -> None:
    for name in ("13c-tools-auto-text-and-call-stream", "07-chat-n2-stream", "05b-completion-stream-n2"):
        responses, entries = [], []
        for number, cut in enumerate((whole, bytewise, in_chunks(7, longest=90))):
            gateway.engine.cut = cut
            rollout = f"{name[:3]}-{number}"
            responses.append((await gateway.replay(name, rollout=rollout)).body)
            found = sorted(await gateway.store.read_entries(rollout), key=lambda entry: entry.model_call_id)
            entries.append([entry.model_dump(exclude={"rollout_id", "model_call_id", "created_at"}) for entry in found])
        assert responses[0] == responses[1] == responses[2]
        assert entries[0] == entries[1] == entries[2]
        assert entries[0]


async def test_each_event_is_passed_on_before_the_next_one_comes(gateway: Gateway) -> None:
    sent = events(FIRST, delta([10]), delta([11]), delta([12], "stop"), usage(3))
    engine = stepped(gateway, sent)
    async with gateway.session.post(gateway.base() + CHAT, json=STREAM) as response:
        for token in range(3):
            engine.step()
            async with asyncio.timeout(60):
                event = await response.content.readuntil(b"\n\n")
            assert b'"choices"' in event, token
        engine.step(len(sent))
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_the_end_is_held_back_until_the_entry_is_durable_and_nothing_before_it(tmp_path: Path) -> None:
    store = LockedStore(tmp_path)
    async with running_gateway(tmp_path, store=store) as gateway:
        sent = events(FIRST, delta([10]), delta([11], "stop"), usage(2))
        stepped(gateway, sent).step(len(sent))
        async with gateway.session.post(gateway.base() + CHAT, json=STREAM) as response:
            await store.arrived.wait()
            for _ in range(2):
                assert b'"finish_reason":null' in await response.content.readuntil(b"\n\n")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await response.content.readany()
            store.released.set()
            rest = await response.content.read()
        assert b'"finish_reason":"stop"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")


async def test_with_several_choices_only_the_last_ones_end_is_held_back(tmp_path: Path) -> None:
    def of_choice(index: int, ids: list[int], finish: str | None = None) -> dict[str, Any]:
        part = delta(ids, finish, prompt_token_ids=[1, 2])
        part["choices"][0]["index"] = index
        return part

    store = LockedStore(tmp_path)
    async with running_gateway(tmp_path, store=store) as gateway:
        sent = events(of_choice(0, [10], "stop"), of_choice(1, [11]), of_choice(1, [12], "length"), usage(3))
        stepped(gateway, sent).step(len(sent))
        async with gateway.session.post(gateway.base() + CHAT, json={**STREAM, "n": 2}) as response:
            await store.arrived.wait()
            first = await response.content.readuntil(b"\n\n") + await response.content.readuntil(b"\n\n")
            assert (b'"stop"' in first, b'"length"' in first) == (True, False)
            store.released.set()
            assert b'"length"' in await response.content.read()
        assert {entry.finish_reason for entry in await stored(gateway, 2)} == {"stop", "length"}


async def test_what_a_client_has_seen_whole_is_durable(gateway: Gateway) -> None:
    for number in range(5):
        async with gateway.session.post(
            gateway.base(f"r{number}") + CHAT,
            data=orjson.dumps(Recording.named("02-chat-stream-usage").client_request()),
            headers={"x-recording": "02-chat-stream-usage"},
        ) as response:
            await response.content.readuntil(b"data: [DONE]\n\n")
            # Harnesses hang up here, before the end of the transfer.
            response.close()
        assert len(await gateway.store.read_entries(f"r{number}")) == 1


@pytest.mark.parametrize("seen", [0, 1, 2])
async def test_a_client_that_hangs_up_leaves_a_complete_call(gateway: Gateway, seen: int) -> None:
    sent = events(FIRST, delta([10]), delta([11, 12], "stop"), usage(3))
    engine = stepped(gateway, sent)
    async with gateway.session.post(gateway.base() + CHAT, json=STREAM) as response:
        for _ in range(seen):
            engine.step()
            await response.content.readuntil(b"\n\n")
        response.close()
    engine.step(len(sent))
    (entry,) = await stored(gateway)
    assert entry.generation_token_ids == [10, 11, 12]
    assert engine.ends == ["whole"]
    assert not (await gateway.store.freeze("r1")).incomplete


async def test_a_client_that_hangs_up_on_an_unstreamed_call_leaves_a_complete_call(gateway: Gateway) -> None:
    go_on = asyncio.Event()
    gateway.engine.handler = answering(chat([5], [-0.1]), after=go_on)
    with pytest.raises(TimeoutError):
        await gateway.session.post(gateway.base() + CHAT, json=BODY, timeout=aiohttp.ClientTimeout(total=0.2))
    go_on.set()
    assert (await stored(gateway))[0].generation_token_ids == [5]


async def test_an_engine_that_does_not_finish_after_a_hang_up_is_cut_off_and_the_call_lost(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, drain_seconds=0.2) as gateway:
        engine = stepped(gateway, events(FIRST, delta([10]), delta([11], "stop"), usage(2)))
        engine.step(2)
        async with gateway.session.post(gateway.base() + CHAT, json=STREAM) as response:
            await response.content.readuntil(b"\n\n")
            response.close()

        async def marked() -> Any:
            return await gateway.flags()

        detail = "the client hung up, and the engine had not finished 0.2 s later"
        assert await until(marked) == [("lost_stream", detail)]
        assert await gateway.intents() == [None]
        assert await gateway.store.read_entries("r1") == ()
        assert (await gateway.store.freeze("r1")).incomplete

        async def cut_off() -> bool:
            engine.step()
            return bool(engine.ends)

        await until(cut_off)
        assert engine.ends != ["whole"]


async def test_many_hang_ups_leave_no_task_and_no_connection_behind(gateway: Gateway) -> None:
    sent = events(FIRST, delta([10]), delta([11], "stop"), usage(2))
    await gateway.request("GET", gateway.url + "/healthz")  # the server has started, with all of its own tasks
    before = asyncio.all_tasks()
    engine = stepped(gateway, sent, free=1)

    async def hang_up(number: int) -> None:
        async with aiohttp.ClientSession() as session:
            path = CHAT if number % 3 else "/v1/inference"
            async with session.post(gateway.base(f"r{number}") + path, json=STREAM) as response:
                if number % 2:
                    await response.content.readany()
                response.close()

    await asyncio.gather(*map(hang_up, range(60)))
    engine.step(60 * len(sent))
    connector = connector_to(gateway.engine.url)

    async def clean() -> bool:
        return len(engine.ends) == 60 and not connector._acquired

    await until(clean)

    async def settled() -> bool:
        captured = [await gateway.store.read_entries(f"r{number}") for number in range(60) if number % 3]
        return all(len(entries) == 1 for entries in captured)

    await until(settled)
    gateway.engine.handler = None
    await gateway.session.close()

    async def quiet() -> bool:
        own = {task for task in asyncio.all_tasks() - before if "uvicorn" in repr(task) or "token_id" in repr(task)}
        return not own

    await until(quiet)


async def test_a_hang_up_on_a_call_that_is_not_captured_stops_the_engine(gateway: Gateway) -> None:
    engine = stepped(gateway, events(*[delta([1])] * 50))
    for url in (gateway.url + CHAT, gateway.base() + "/v1/inference"):
        async with gateway.session.post(url, json=STREAM) as response:
            engine.step()
            await response.content.readany()
            response.close()
        ends = len(engine.ends)

        async def stopped(ends: int = ends) -> bool:
            engine.step()
            return len(engine.ends) > ends

        await until(stopped)
    assert "whole" not in engine.ends
    assert await gateway.flags() == [("uncaptured_endpoint", "POST /v1/inference")]


async def test_a_server_that_stops_finishes_the_calls_in_flight(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, grace=60) as gateway:
        sent = events(FIRST, delta([10]), delta([11], "stop"), usage(2))
        engine = stepped(gateway, sent)
        async with gateway.session.post(gateway.base() + CHAT, json=STREAM) as response:
            engine.step()
            await response.content.readuntil(b"\n\n")
            gateway.server.should_exit = True

            async def refusing() -> bool:
                # A connection that only the kernel had accepted when the listener closed is reset.
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
                    writer.close()
                    await writer.wait_closed()
                except ConnectionError:
                    return True
                return False

            await until(refusing)
            engine.step(len(sent))
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        assert (await stored(gateway))[0].generation_token_ids == [10, 11]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_server_that_is_out_of_time_leaves_an_open_intent(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, grace=0) as gateway:
        engine = stepped(gateway, events(FIRST, delta([10], "stop"), usage(1)))
        async with gateway.session.post(gateway.base() + CHAT, json=STREAM) as response:
            engine.step()
            await response.content.readuntil(b"\n\n")
            gateway.server.should_exit = True
            with pytest.raises(aiohttp.ClientError):
                await response.content.read()
        async with TokenCaptureStore(tmp_path, create=False) as reader:
            (intent,) = (await reader.describe_rollout("r1")).intents
            assert intent.outcome is None
            assert (await reader.freeze("r1")).incomplete
        engine.step(5)
