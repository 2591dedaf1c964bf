"""Rollouts handed off over HTTP: what a client gets, who may ask, and what ends in the middle. Over real sockets."""

from __future__ import annotations

import asyncio
import io
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pyarrow
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from support.finalizing import LOG_PROBS, LOSS_MASK, SEQUENCE, two_turns
from support.replay import serving
from token_id_capture import HandOffClient, HandOffError, RolloutRetiredError, SnapshotRef, UnknownRolloutError
from token_id_capture.errors import ConfigurationError, CorruptCaptureError
from token_id_capture.hand_off.routes import HandOff
from token_id_capture.lifecycle import Outcome, Sequences, State
from token_id_capture.records import TokenEntry
from token_id_capture.server.app import create_app
from token_id_capture.server.http.auth import KeyedApp
from token_id_capture.store import TokenCaptureStore

KEY, AGENTS = "key-of-the-trainer", "key-of-the-agents"
NOBODY = "http://127.0.0.1:9"


@dataclass
class Offered:
    """A gateway that hands off, its store, and the application behind its key, which a test may replace."""

    url: str
    store: TokenCaptureStore
    hand_off: ASGIApp

    def client(self, key: str = KEY, patience: float = 5.0) -> HandOffClient:
        return HandOffClient(self.url, key, patience=patience)

    async def request(self, method: str, path: str, key: str | None = KEY, **options: Any) -> tuple[int, Any, bytes]:
        headers = {**options.pop("headers", {}), **({} if key is None else {"authorization": f"Bearer {key}"})}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, headers=headers, **options) as response,
        ):
            return response.status, response.headers, await response.read()


@pytest.fixture
async def offered(tmp_path: Path) -> AsyncIterator[Offered]:
    store = TokenCaptureStore(tmp_path / "captures.db")
    offered = Offered("", store, HandOff(store).app())

    async def behind_the_key(scope: Scope, receive: Receive, send: Send) -> None:
        await offered.hand_off(scope, receive, send)

    app = create_app(NOBODY, store, api_key=AGENTS, hand_off=KeyedApp(behind_the_key, KEY))
    async with serving(app) as (offered.url, _), TokenCaptureStore(store.database) as offered.store:
        yield offered


async def capture(offered: Offered, *rollouts: str) -> None:
    await asyncio.gather(*(offered.store.put(entry) for name in rollouts for entry in two_turns(name)))


# What a client gets


async def test_a_snapshot_arrives_as_the_store_gives_it(offered: Offered) -> None:
    await capture(offered, "r")
    await offered.store.begin_call("r", "lost")
    async with offered.client() as client:
        snapshot = await client.freeze("r")
        assert snapshot == await offered.store.freeze("r") == await client.freeze("r")
    assert (snapshot.incomplete, [flag.reason for flag in snapshot.flags]) == (True, ["call_lost"])


async def test_rows_are_those_of_finalize_and_end_in_an_acknowledgement(offered: Offered) -> None:
    await capture(offered, "r")
    async with offered.client() as client:
        assert [one.rollout_id async for one in client.waiting()] == ["r"]
        handed = await client.rows("r", {"reward": 0.5, "response": {"output": []}})
        again = await client.rows("r", {"reward": 0.5, "response": {"output": []}})
        assert again == handed
        (row,) = handed.rows()
        assert (row["token_ids"], row["loss_mask"], row["log_probs"]) == (SEQUENCE, LOSS_MASK, LOG_PROBS)
        assert (row["reward"], row["mask_sample"], row["snapshot_id"]) == (0.5, False, handed.snapshot.snapshot_id)
        assert (handed.outcome, handed.reason) == (Outcome.DELIVERABLE, "")
        assert (await client.describe_rollout("r")).summary.state is State.FROZEN
        assert [await client.acknowledge(handed.snapshot) for _ in range(2)] == [True, True]
        detail = await client.describe_rollout("r")
        assert (detail.summary.state, detail.summary.outcome) == (State.RETIRED, Outcome.DELIVERED)
        assert detail == await offered.store.describe_rollout("r")
        assert [one async for one in client.waiting()] == []
        for asked in (client.freeze, client.rows):
            with pytest.raises(RolloutRetiredError, match="'r' is retired"):
                await asked("r")


async def test_rows_come_as_an_arrow_stream_to_those_who_accept_it(offered: Offered) -> None:
    await capture(offered, "r")
    async with offered.client() as client:
        handed = await client.rows("r", arrow=True, sequences=Sequences.ALL)
    table = pyarrow.ipc.open_stream(io.BytesIO(handed.body)).read_all()
    assert table.column("token_ids").to_pylist() == [SEQUENCE]
    assert table.column("log_probs").to_pylist() == [LOG_PROBS]
    assert table.column("snapshot_id").to_pylist() == [handed.snapshot.snapshot_id]


async def test_only_the_latest_state_is_retired_and_evidence_never(offered: Offered) -> None:
    await capture(offered, "changed", "masked")
    async with offered.client() as client:
        first = await client.rows("changed")
        await offered.store.mark_incomplete("changed", "b", "lost_stream")
        assert await client.acknowledge(first.snapshot) is False
        assert await client.acknowledge(SnapshotRef("changed", "of another", 1)) is False
        await offered.store.mark_incomplete("masked", "b", "lost_stream")
        masked = await client.rows("masked")
        assert (masked.outcome, masked.reason) == (Outcome.MASKED, "capture_incomplete")
        assert masked.rows()[0]["mask_sample"] is True
        assert await client.acknowledge(masked.snapshot) is False
        detail = await client.describe_rollout("masked")
        assert (detail.summary.state, detail.summary.outcome) == (State.FROZEN, Outcome.MASKED)


async def test_rows_that_are_deliverable_after_others_were_masked_are_retired_with_them(offered: Offered) -> None:
    """A first try with the wrong models masks the rollout; a mere acknowledgement of its state keeps the evidence."""
    await capture(offered, "r")
    async with offered.client() as client:
        masked = await client.rows("r", models=["another"])
        assert (masked.outcome, await client.acknowledge(masked)) == (Outcome.MASKED, False)
        handed = await client.rows("r")
        assert (handed.outcome, handed.snapshot) == (Outcome.DELIVERABLE, masked.snapshot)
        assert await client.acknowledge(handed.snapshot) is False
        state = {"snapshot_id": handed.snapshot.snapshot_id, "version": 1}
        status, _, body = await offered.request("POST", "/hand-off/rollouts/r/acknowledge", json=state)
        assert (status, orjson.loads(body)["error"]["code"]) == (409, "kept_as_evidence")
        assert [await client.acknowledge(handed) for _ in range(2)] == [True, True]
        detail = await client.describe_rollout("r")
    assert (detail.summary.state, detail.summary.outcome) == (State.RETIRED, Outcome.DELIVERED)


async def test_what_waits_is_listed_in_pages_without_what_was_taken_or_masked(offered: Offered) -> None:
    names = [f"r{number:02d}" for number in range(20)]
    await capture(offered, *names)
    for name in names[::3]:
        await offered.store.freeze(name)
    async with offered.client() as client:
        assert [one.rollout_id async for one in client.waiting(page=3)] == names
        await client.acknowledge((await client.rows("r03")).snapshot)
        await client.record_outcome((await client.freeze("r04")).snapshot_id, 1, Outcome.MASKED, "capture_incomplete")
        left = [one.rollout_id async for one in client.waiting(page=3)]
    assert left == [name for name in names if name not in ("r03", "r04")]


async def test_a_rollout_that_nobody_has_seen_is_unknown_and_stays_so(offered: Offered) -> None:
    async with offered.client() as client:
        assert (await client.freeze("typo")).snapshot_id == ""
        for asked in (
            client.rows("typo"),
            client.describe_rollout("typo"),
            client.acknowledge(SnapshotRef("typo", "s", 1)),
        ):
            with pytest.raises(UnknownRolloutError, match=r"no rollout 'typo' .* GET /hand-off/rollouts lists"):
                await asked
        with pytest.raises(ValueError, match="invalid rollout id"):
            await client.freeze("../r")
    assert await offered.store.list_rollouts() == []


UNREADABLE = (
    ("GET", "/rollouts?limit=0", b"", "limit must be a number from 1 to 1000"),
    ("GET", "/rollouts?limit=x", b"", "limit must be a number from 1 to 1000"),
    ("GET", "/rollouts/.r", b"", "invalid rollout id"),
    ("POST", "/rollouts/r/rows?sequences=some", b"", "sequences must be one of main, all"),
    ("POST", "/rollouts/r/rows?masked=some", b"", "masked must be one of keep, drop, placeholder"),
    ("POST", "/rollouts/r/rows", b"[]", "not a JSON object"),
    ("POST", "/rollouts/r/rows", b'{"_ng_rollout_id": "s"}', "the record is of rollout 's', not of 'r'"),
    ("POST", "/rollouts/r/acknowledge", b"{", "truncated"),
    ("POST", "/rollouts/r/acknowledge", b'{"snapshot_id": 1}', "Expected `str`"),
    ("POST", "/outcomes", b'{"snapshot_id": "s", "version": 1, "outcome": "released"}', "unknown outcome"),
    ("POST", "/outcomes", b'{"snapshot_id": "s", "version": %d, "outcome": "masked"}' % 2**70, "$.version"),
    ("POST", "/rollouts/r/acknowledge", b'{"snapshot_id": "s", "version": %d}' % 2**31, "$.version"),
)


async def test_a_request_that_cannot_be_read_says_what_is_wrong(offered: Offered) -> None:
    for method, path, sent, said in UNREADABLE:
        status, _, body = await offered.request(method, f"/hand-off{path}", data=sent)
        error = orjson.loads(body)["error"]
        assert (status, error["code"]) == (400, "invalid_request"), path
        assert said in error["message"]


async def test_a_wrong_method_is_refused_as_json_and_names_the_right_one(offered: Offered) -> None:
    for method, path, right in (("DELETE", "/rollouts/r", "GET"), ("GET", "/outcomes", "POST")):
        status, headers, body = await offered.request(method, f"/hand-off{path}")
        error = orjson.loads(body)["error"]
        assert (status, error["code"], headers["allow"]) == (405, "method_not_allowed", right)
        assert error["message"] == f"Use {right} here."


async def test_a_client_that_hangs_up_within_its_request_is_no_error_of_the_gateway(offered: Offered) -> None:
    within, ended = offered.hand_off, asyncio.get_running_loop().create_future()

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await within(scope, receive, send)
            ended.set_result(None)
        except Exception as error:
            ended.set_exception(error)

    offered.hand_off = watched
    _, writer = await asyncio.open_connection("127.0.0.1", int(offered.url.rpartition(":")[2]))
    head = (
        f"POST /hand-off/rollouts/r/rows HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: {KEY}\r\ncontent-length: 9\r\n\r\n{{"
    )
    writer.write(head.encode())
    await writer.drain()
    writer.close()
    assert await asyncio.wait_for(ended, 60) is None


# Who may ask


async def test_without_its_key_the_hand_off_tells_nothing(offered: Offered) -> None:
    await capture(offered, "known")
    told = set()
    for key in (None, "", AGENTS, KEY[:-1], f"{KEY}x"):
        for path in ("/rollouts", "/rollouts/known", "/rollouts/unknown", "/nothing", "/", ""):
            status, headers, body = await offered.request("GET", f"/hand-off{path}", key)
            assert (status, headers["connection"]) == (401, "close")
            told.add(body)
        assert (await offered.request("POST", "/hand-off/rollouts/known/rows", key))[0] == 401
    assert len(told) == 1
    assert (await offered.store.describe_rollout("known")).summary.state is State.OPEN


async def test_the_key_of_the_hand_off_opens_nothing_else(offered: Offered) -> None:
    await capture(offered, "r")
    base = "/ng-rollout/r/training-token-capture"
    for path in (
        "/v1/models",
        "/metrics",
        "/admin/weight-version",
        f"{base}/hand-off/rollouts",
        "/hand-offs",
        "//hand-off/rollouts",
    ):
        assert (await offered.request("GET", path))[0] == 401, path
    # Below a rollout's prefix the path is the engine's, of which there is none here.
    assert (await offered.request("GET", f"{base}/hand-off/rollouts", AGENTS))[0] == 502
    with pytest.raises(HandOffError, match="refuses the key: send that of its --hand-off-key-file"):
        await offered.client(AGENTS).__aenter__()


async def test_who_takes_what_is_in_the_access_log_and_the_key_is_not(
    offered: Offered, caplog: pytest.LogCaptureFixture
) -> None:
    await capture(offered, "r")
    with caplog.at_level(logging.INFO, logger="token_id_capture.access"):
        async with offered.client() as client:
            await client.freeze("r")
    assert "POST /hand-off/rollouts/r/snapshot: 200" in caplog.text
    assert KEY not in caplog.text


async def test_without_a_key_file_nothing_is_handed_off_and_no_key_reaches_the_engine(tmp_path: Path) -> None:
    store = TokenCaptureStore(tmp_path / "captures.db")
    async with serving(create_app(NOBODY, store)) as (url, _):
        with pytest.raises(HandOffError, match="started without --hand-off-key-file"):
            await HandOffClient(url, KEY).__aenter__()
    with pytest.raises(ConfigurationError, match="of the hand-off is that of the agents"):
        create_app(NOBODY, None, api_key=KEY, hand_off=KeyedApp(HandOff(store).app(), KEY))


def test_an_address_that_is_none_is_refused() -> None:
    for address in ("gateway", "ftp://g", "http://", "http://u:p@g", "http://[", "http://g?key=k"):
        with pytest.raises(ConfigurationError, match=r"URL|address of a gateway"):
            HandOffClient(address, KEY)


# What ends in the middle, or is damaged


def damaging(app: ASGIApp, damage: Callable[[Message], Message], times: int) -> ASGIApp:
    """``app``, whose first answers to requests for a rollout are damaged."""
    left = times

    async def damaged(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal left
        hurt = left > 0 and scope["path"].endswith(("/rows", "/snapshot"))
        left -= hurt

        async def passed(message: Message) -> None:
            await send(damage(message) if hurt else message)

        await app(scope, receive, passed)

    return damaged


def without_length(message: Message) -> Message:
    """As an HTTP/1.0 proxy passes it on: chunked, without the length, and short."""
    if message["type"] == "http.response.start":
        return {
            **message,
            "headers": [(name, value) for name, value in message["headers"] if name != b"content-length"],
        }
    return {**message, "body": message["body"][:-3]}


def flipped(message: Message) -> Message:
    if message["type"] != "http.response.body" or not message["body"]:
        return message
    body = bytearray(message["body"])
    body[len(body) // 2] ^= 1
    return {**message, "body": bytes(body)}


async def test_a_body_that_is_not_whole_is_asked_for_again_and_never_used(offered: Offered) -> None:
    await capture(offered, "r")
    whole = offered.hand_off
    async with offered.client() as client, offered.client(patience=0.1) as impatient:
        for damage in (without_length, flipped):
            for ask, ask_once in ((client.freeze, impatient.freeze), (client.rows, impatient.rows)):
                offered.hand_off = damaging(whole, damage, 1)
                first = await ask("r")
                offered.hand_off = whole
                assert first == await ask("r")
                offered.hand_off = damaging(whole, damage, 99)
                with pytest.raises(HandOffError, match="which are not what the gateway sent"):
                    await ask_once("r")
    assert (await offered.store.describe_rollout("r")).summary.state is State.FROZEN


async def test_a_connection_that_ends_within_a_body_is_an_error(offered: Offered) -> None:
    await capture(offered, "r")
    whole = offered.hand_off

    async def cut(scope: Scope, receive: Receive, send: Send) -> None:
        async def first_half(message: Message) -> None:
            if message["type"] == "http.response.body":
                await send({**message, "body": message["body"][: len(message["body"]) // 2], "more_body": True})
                raise ConnectionAbortedError
            await send(message)

        await whole(scope, receive, first_half if scope["path"].endswith("/rows") else send)

    offered.hand_off = cut
    async with offered.client(patience=0.1) as client:
        with pytest.raises(HandOffError, match=r"rows of the gateway at .* failed"):
            await client.rows("r")


async def test_damage_in_the_database_is_told_as_such(offered: Offered) -> None:
    await capture(offered, "r")
    with closing(sqlite3.connect(offered.store.database)) as connection, connection:
        connection.execute("UPDATE entries SET log_probs = zeroblob(length(log_probs))")
    async with offered.client() as client:
        for asked in (client.freeze, client.rows):
            with pytest.raises(CorruptCaptureError, match="of rollout 'r' is damaged"):
                await asked("r")


async def test_a_body_larger_than_what_is_kept_in_memory_comes_from_a_file(offered: Offered) -> None:
    generation = list(range(150_000))
    await offered.store.put(
        TokenEntry(
            rollout_id="large",
            model_call_id="a",
            prompt_token_ids=[1],
            generation_token_ids=generation,
            generation_log_probs=[-0.123456789] * len(generation),
            output_items=[{"type": "message", "role": "assistant", "content": "x"}],
            token_item_index=0,
            finish_reason="stop",
        )
    )
    async with offered.client() as client:
        snapshot, handed = await client.freeze("large"), await client.rows("large")
    assert snapshot.entries[0].generation_token_ids == generation
    (row,) = handed.rows()
    assert (len(handed.body) > 2**21, row["token_ids"]) == (True, [1, *generation])
    assert row["log_probs"] == [0.0, *[-0.123456789] * len(generation)]
