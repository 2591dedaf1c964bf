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
from made_up import BODY, CHAT, FIRST, STREAM, answering, chat, delta, events, streaming, usage
from replay import Gateway, Recording, gateway, until

from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing.replay import Cut, bytewise, in_chunks, whole

SPLIT_CHARACTER = "字é🙂"


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path) as running:
        yield running


class GatedStore(TokenCaptureStore):
    """A store whose ``put`` waits to be let through."""

    def __init__(self, database: Path) -> None:
        super().__init__(database)
        self.arrived, self.released = asyncio.Event(), asyncio.Event()

    async def put(self, entry: TokenEntry) -> None:
        self.arrived.set()
        await self.released.wait()
        await super().put(entry)


class SteppedEngine:
    """Streams one event for each ``step``, after ``free`` ones, and remembers how its replies ended."""

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


def stepped(gate: Gateway, chunks: Iterable[bytes], free: int = 0) -> SteppedEngine:
    engine = SteppedEngine(chunks, free)
    gate.engine.handler = engine
    return engine


async def stored(gate: Gateway, count: int = 1) -> tuple[TokenEntry, ...]:
    async def there() -> tuple[TokenEntry, ...]:
        entries = await gate.store.read_entries("r1")
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
    gate: Gateway, cut: Cut, end: bytes, space: bytes
) -> None:
    def spelled(frames: Iterable[bytes]) -> bytes:
        lines = b"".join(frames).replace(b"data: ", b"data:" + space)
        return b": hello" + end + end + lines.replace(b"\n", end)

    first, second = delta([10]), delta([11, 12], "stop")
    first["choices"][0]["delta"]["content"] = SPLIT_CHARACTER
    written = [orjson.dumps(part) for part in (FIRST, first, second, usage(3))]
    sent = spelled(b"data: " + text + b"\n\n" for text in (*written, b"[DONE]"))
    gate.engine.handler = streaming(*cut(sent))
    reply = await gate.post(CHAT, {**STREAM, "stream_options": {"include_usage": True}})
    hidden = [_nulled(part) for part in (FIRST, first, second, usage(3))]
    assert reply.body == spelled(b"data: " + text + b"\n\n" for text in (*hidden, b"[DONE]"))
    entry = await gate.entry()
    assert entry.generation_token_ids == [10, 11, 12]
    assert entry.output_items[0]["content"] == "x" + SPLIT_CHARACTER + "x"


def _nulled(part: dict[str, Any]) -> bytes:
    copied = orjson.loads(orjson.dumps(part))
    for holder in (copied, *copied["choices"]):
        for name in ("token_ids", "prompt_token_ids", "logprobs"):
            if name in holder:
                holder[name] = None
    return orjson.dumps(copied)


async def test_recorded_streams_give_the_same_entry_byte_by_byte(gate: Gateway) -> None:
    for name in ("13c-tools-auto-text-and-call-stream", "07-chat-n2-stream", "05b-completion-stream-n2"):
        replies, entries = [], []
        for number, cut in enumerate((whole, bytewise, in_chunks(7, longest=90))):
            gate.engine.cut = cut
            rollout = f"{name[:3]}-{number}"
            replies.append((await gate.replay(name, rollout=rollout)).body)
            found = sorted(await gate.store.read_entries(rollout), key=lambda entry: entry.model_call_id)
            entries.append([entry.model_dump(exclude={"rollout_id", "model_call_id", "created_at"}) for entry in found])
        assert replies[0] == replies[1] == replies[2]
        assert entries[0] == entries[1] == entries[2]
        assert entries[0]


async def test_each_event_is_passed_on_before_the_next_one_comes(gate: Gateway) -> None:
    sent = events(FIRST, delta([10]), delta([11]), delta([12], "stop"), usage(3))
    engine = stepped(gate, sent)
    async with gate.session.post(gate.base() + CHAT, json=STREAM) as response:
        for token in range(3):
            engine.step()
            async with asyncio.timeout(5):
                event = await response.content.readuntil(b"\n\n")
            assert b'"choices"' in event, token
        engine.step(len(sent))
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")


async def test_the_end_is_held_back_until_the_entry_is_durable_and_nothing_before_it(tmp_path: Path) -> None:
    store = GatedStore(tmp_path)
    async with gateway(tmp_path, store=store) as gate:
        sent = events(FIRST, delta([10]), delta([11], "stop"), usage(2))
        stepped(gate, sent).step(len(sent))
        async with gate.session.post(gate.base() + CHAT, json=STREAM) as response:
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

    store = GatedStore(tmp_path)
    async with gateway(tmp_path, store=store) as gate:
        sent = events(of_choice(0, [10], "stop"), of_choice(1, [11]), of_choice(1, [12], "length"), usage(3))
        stepped(gate, sent).step(len(sent))
        async with gate.session.post(gate.base() + CHAT, json={**STREAM, "n": 2}) as response:
            await store.arrived.wait()
            first = await response.content.readuntil(b"\n\n") + await response.content.readuntil(b"\n\n")
            assert (b'"stop"' in first, b'"length"' in first) == (True, False)
            store.released.set()
            assert b'"length"' in await response.content.read()
        assert {entry.finish_reason for entry in await stored(gate, 2)} == {"stop", "length"}


async def test_what_a_client_has_seen_whole_is_durable(gate: Gateway) -> None:
    for number in range(5):
        async with gate.session.post(
            gate.base(f"r{number}") + CHAT,
            data=orjson.dumps(Recording.named("02-chat-stream-usage").client_request()),
            headers={"x-recording": "02-chat-stream-usage"},
        ) as response:
            await response.content.readuntil(b"data: [DONE]\n\n")
            # Harnesses hang up here, before the end of the transfer.
            response.close()
        assert len(await gate.store.read_entries(f"r{number}")) == 1


@pytest.mark.parametrize("seen", [0, 1, 2])
async def test_a_client_that_hangs_up_leaves_a_complete_call(gate: Gateway, seen: int) -> None:
    sent = events(FIRST, delta([10]), delta([11, 12], "stop"), usage(3))
    engine = stepped(gate, sent)
    async with gate.session.post(gate.base() + CHAT, json=STREAM) as response:
        for _ in range(seen):
            engine.step()
            await response.content.readuntil(b"\n\n")
        response.close()
    engine.step(len(sent))
    (entry,) = await stored(gate)
    assert entry.generation_token_ids == [10, 11, 12]
    assert engine.ends == ["whole"]
    assert not (await gate.store.freeze("r1")).incomplete


async def test_a_client_that_hangs_up_on_an_unstreamed_call_leaves_a_complete_call(gate: Gateway) -> None:
    go_on = asyncio.Event()
    gate.engine.handler = answering(chat([5], [-0.1]), after=go_on)
    with pytest.raises(TimeoutError):
        await gate.session.post(gate.base() + CHAT, json=BODY, timeout=aiohttp.ClientTimeout(total=0.2))
    go_on.set()
    assert (await stored(gate))[0].generation_token_ids == [5]


async def test_an_engine_that_does_not_finish_after_a_hang_up_is_cut_off_and_the_call_lost(tmp_path: Path) -> None:
    async with gateway(tmp_path, drain_seconds=0.2) as gate:
        engine = stepped(gate, events(FIRST, delta([10]), delta([11], "stop"), usage(2)))
        engine.step(2)
        async with gate.session.post(gate.base() + CHAT, json=STREAM) as response:
            await response.content.readuntil(b"\n\n")
            response.close()

        async def marked() -> Any:
            return await gate.flags()

        detail = "the client hung up, and the engine had not finished 0.2 s later"
        assert await until(marked) == [("lost_stream", detail)]
        assert await gate.intents() == [None]
        assert await gate.store.read_entries("r1") == ()
        assert (await gate.store.freeze("r1")).incomplete

        async def cut_off() -> bool:
            engine.step()
            return bool(engine.ends)

        await until(cut_off)
        assert engine.ends != ["whole"]


async def test_many_hang_ups_leave_no_task_and_no_connection_behind(gate: Gateway) -> None:
    sent = events(FIRST, delta([10]), delta([11], "stop"), usage(2))
    await gate.request("GET", gate.url + "/healthz")  # the server has started, with all of its own tasks
    before = asyncio.all_tasks()
    engine = stepped(gate, sent, free=1)

    async def hang_up(number: int) -> None:
        async with aiohttp.ClientSession() as session:
            path = CHAT if number % 3 else "/v1/responses"
            async with session.post(gate.base(f"r{number}") + path, json=STREAM) as response:
                if number % 2:
                    await response.content.readany()
                response.close()

    await asyncio.gather(*map(hang_up, range(60)))
    engine.step(60 * len(sent))
    connector = gate.app._upstream._session.connector

    async def clean() -> bool:
        return len(engine.ends) == 60 and not connector._acquired

    await until(clean)

    async def settled() -> bool:
        captured = [await gate.store.read_entries(f"r{number}") for number in range(60) if number % 3]
        return all(len(entries) == 1 for entries in captured)

    await until(settled)
    gate.engine.handler = None
    await gate.session.close()

    async def quiet() -> bool:
        own = {task for task in asyncio.all_tasks() - before if "uvicorn" in repr(task) or "token_id" in repr(task)}
        return not own

    await until(quiet)


async def test_a_hang_up_on_a_call_that_is_not_captured_stops_the_engine(gate: Gateway) -> None:
    engine = stepped(gate, events(*[delta([1])] * 50))
    for url in (gate.url + CHAT, gate.base() + "/v1/responses"):
        async with gate.session.post(url, json=STREAM) as response:
            engine.step()
            await response.content.readany()
            response.close()
        ends = len(engine.ends)

        async def stopped(ends: int = ends) -> bool:
            engine.step()
            return len(engine.ends) > ends

        await until(stopped)
    assert "whole" not in engine.ends
    assert await gate.flags() == [("uncaptured_endpoint", "POST /v1/responses")]


async def test_a_server_that_stops_finishes_the_calls_in_flight(tmp_path: Path) -> None:
    async with gateway(tmp_path, grace=60) as gate:
        sent = events(FIRST, delta([10]), delta([11], "stop"), usage(2))
        engine = stepped(gate, sent)
        async with gate.session.post(gate.base() + CHAT, json=STREAM) as response:
            engine.step()
            await response.content.readuntil(b"\n\n")
            gate.server.should_exit = True

            async def refusing() -> bool:
                # A connection that only the kernel had accepted when the listener closed is reset.
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", int(gate.url.rpartition(":")[2]))
                    writer.close()
                    await writer.wait_closed()
                except ConnectionError:
                    return True
                return False

            await until(refusing)
            engine.step(len(sent))
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        assert (await stored(gate))[0].generation_token_ids == [10, 11]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_server_that_is_out_of_time_leaves_an_open_intent(tmp_path: Path) -> None:
    async with gateway(tmp_path, grace=0) as gate:
        engine = stepped(gate, events(FIRST, delta([10], "stop"), usage(1)))
        async with gate.session.post(gate.base() + CHAT, json=STREAM) as response:
            engine.step()
            await response.content.readuntil(b"\n\n")
            gate.server.should_exit = True
            with pytest.raises(aiohttp.ClientError):
                await response.content.read()
        async with TokenCaptureStore(tmp_path, create=False) as reader:
            (intent,) = (await reader.describe_rollout("r1")).intents
            assert intent.outcome is None
            assert (await reader.freeze("r1")).incomplete
        engine.step(5)
