"""``tokcap view``: the live page's server, asked over HTTP while others write."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from support.commands import RunTokcap
from support.reported import Rollout, write_rollouts
from support.viewing import SECONDS, Server, running
from token_id_capture.store import TokenCaptureStore


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("what?") / "captures.db"
    asyncio.run(write_rollouts(path))
    return path


@pytest.fixture(scope="module")
def server(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    records = tmp_path_factory.mktemp("records") / "records.jsonl"
    records.write_text('{"_ng_rollout_id": "masked", "reward": 0.5, "_ng_task_index": 3, "_ng_rollout_index": 0}\n')
    with running(database, "--records", records) as started:
        yield started


async def get(server: Server, path: str, **parameters: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers=server.headers) as session,
        session.get(server.base + path, params=parameters) as response,
    ):
        return response.status, await response.json()


class Events:
    """Lines of rollouts as they are told; each is asked for until it is there."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.told = 0

    async def line(self, rollout_id: str, **expected: Any) -> dict[str, Any]:
        async with asyncio.timeout(SECONDS):
            async for raw in self._response.content:
                for line in json.loads(raw[5:]) if raw.startswith(b"data:") else ():
                    self.told += 1
                    if line["id"] == rollout_id and expected.items() <= line.items():
                        return dict(line)
        raise AssertionError("the stream ended")

    async def trouble(self) -> str:
        async with asyncio.timeout(SECONDS):
            while await self._response.content.readline() != b"event: trouble\n":
                assert not self._response.content.at_eof(), "the stream ended"
            return (await self._response.content.readline()).decode()


@contextlib.asynccontextmanager
async def following(server: Server) -> AsyncIterator[Events]:
    async with (
        aiohttp.ClientSession(headers=server.headers) as session,
        session.get(server.base + "api/events") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        assert await response.content.readline() == b": follows\n"
        yield Events(response)


async def test_the_page_may_ask_its_own_server_and_nobody_else(server: Server) -> None:
    cookies = aiohttp.CookieJar(unsafe=True)  # also of an address that is a number
    url = f"{server.base}?key={server.key}"
    async with aiohttp.ClientSession(cookie_jar=cookies) as session, session.get(url) as page:
        # The key went into a cookie, and out of the address.
        assert str(page.url) == server.base
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert '"live":true' in await page.text()


async def test_the_newest_rollouts_come_first_and_are_narrowed_by_what_is_known(server: Server) -> None:
    _, everyone = await get(server, "api/rollouts")
    assert [line["id"] for line in everyone["lines"]][::-1] == [
        *("delivered", "masked", "retired", "released", "frozen", "open", "nothing", "hostile")
    ]
    assert everyone["more"] is False
    narrowed = {
        "delivered": {"outcome": "delivered", "state": "frozen"},
        "open": {"text": "OPE"},
        "masked": {"cause": "sub_agent", "reason": "capture_incomplete"},
        "retired": {"state": "retired", "before": "4"},
    }
    for rollout_id, wanted in narrowed.items():
        _, found = await get(server, "api/rollouts", **wanted)
        assert [line["id"] for line in found["lines"]] == [rollout_id], wanted
    _, found = await get(server, "api/rollouts", text="masked")
    assert (found["lines"][0]["reward"], found["lines"][0]["group"]) == (0.5, "3")


async def test_a_rollout_is_what_the_report_shows_of_it(
    server: Server, database: Path, tokcap: RunTokcap, tmp_path: Path
) -> None:
    _, live = await get(server, "api/rollouts/masked")
    tokcap("report", "masked", "-d", database, "-o", tmp_path / "page.html")
    block = re.search(r'id="data">(.*?)</script>', (tmp_path / "page.html").read_text("utf-8"))
    assert block
    assert {**live, "made_at": 0} == {**json.loads(block[1])["rollout"], "made_at": 0}
    _, overview = await get(server, "api/overview")
    assert overview["tiles"][0]["value"] == "2"


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("api/rollouts/nobody", 404, "no rollout 'nobody' is in this database"),
        ("api/rollouts/..%2F..%2Fetc", 404, ""),
        ("api/rollouts?state=lost", 400, "'lost' is not a valid State"),
        ("api/rollouts?before=x", 400, "invalid literal"),
        (f"api/rollouts?before={10**30}", 200, "hostile"),
        (f"api/rollouts?before=-{10**30}", 200, '"lines":[]'),
    ],
)
async def test_what_cannot_be_shown_is_told(server: Server, path: str, status: int, said: str) -> None:
    async with (
        aiohttp.ClientSession(headers=server.headers) as session,
        session.get(server.base + path) as response,
    ):
        assert response.status == status
        assert said in await response.text()


async def test_whoever_watches_is_told_what_changes(server: Server, database: Path) -> None:
    async with following(server) as events, following(server) as others, TokenCaptureStore(database) as store:
        rollout = Rollout(store, "later")
        await store.begin_call("later", "call-x")
        assert (await events.line("later", open_calls=1))["state"] == "open"
        await store.refuse_call("later", "call-x", "busy")
        await events.line("later", open_calls=0)
        await rollout.call()
        assert (await events.line("later", calls=1))["generated_tokens"] == 6
        await store.mark_incomplete("later", "", "no_token_ids")
        await events.line("later", flags=1)
        snapshot = await store.freeze("later")
        await events.line("later", state="frozen")
        await store.record_outcome(snapshot.snapshot_id, snapshot.version, "delivered", "", {})
        await events.line("later", outcome="delivered")
        assert await store.drop("later", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        await events.line("later", state="retired")
        await others.line("later", state="retired")
        # Of all that is stored nothing was told but the one that changed.
        assert events.told <= 12
        # And nobody who watches holds a state of the database.
        with contextlib.closing(sqlite3.connect(database)) as connection:
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert busy == 0


async def test_a_page_that_opens_while_the_database_cannot_be_read_is_told_so_and_follows_once_it_can(
    database: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(database, tmp_path / "moved.db"))
    with running(path) as started:
        shutil.move(path, tmp_path / "away.db")
        async with following(started) as events:
            assert "cannot be read" in await events.trouble()
            shutil.move(tmp_path / "away.db", path)
            # Whatever was stored before the first look that succeeds is not told, so writing goes on until it is.
            async with TokenCaptureStore(path) as store, asyncio.timeout(SECONDS):
                told = asyncio.create_task(events.line("again"))
                while not told.done():
                    await Rollout(store, "again").call()
                    await asyncio.wait([told], timeout=0.2)
                assert (await told)["state"] == "open"


async def test_ctrl_c_while_a_page_is_open_says_nothing(database: Path) -> None:
    with running(database) as started:
        leave = contextlib.AsyncExitStack()
        await leave.enter_async_context(following(started))
    await leave.aclose()


async def test_the_key_leads_to_no_other_host(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        url = URL(f"{server.base}/elsewhere.example/?key={server.key}", encoded=True)
        async with session.get(url, allow_redirects=False) as response:
            assert (response.status, response.headers["location"]) == (303, "/elsewhere.example/")


@pytest.mark.parametrize("path", ["", "api/rollouts", "api/rollouts/masked", "api/events"])
async def test_without_the_key_nothing_is_shown(server: Server, path: str) -> None:
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            async with session.get(server.base + path, headers=headers) as refused:
                assert refused.status == 403
                assert "the address that tokcap view printed" in await refused.text()
        async with session.get(server.base + path, headers={**server.headers, "Host": "captures.example"}) as refused:
            assert refused.status == 421


def test_only_who_has_a_key_file_may_let_others_look(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    refused = tokcap("view", "-d", database, "--host", "0.0.0.0")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "0.0.0.0 can be reached from other machines: give --api-key-file" in refused.stderr
    key = tmp_path / "view.key"
    key.write_text("of-the-operator\n")
    key.chmod(0o600)
    with running(database, "--host", "0.0.0.0", "--api-key-file", key) as started:
        assert started.key == "KEY"  # what the file says is not printed
        port = started.base.rpartition(":")[2]
        status, _ = asyncio.run(get(Server(f"http://127.0.0.1:{port}", "of-the-operator"), "api/overview"))
        assert status == 200


def test_a_missing_database_is_one_line(tokcap: RunTokcap, tmp_path: Path) -> None:
    refused = tokcap("view", "-d", tmp_path / "none.db")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "there is no capture database" in refused.stderr
