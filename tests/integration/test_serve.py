"""The command ``tokcap serve`` as a real process: what stops it at the start, how it serves, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import orjson
import pytest
from aiohttp import web

from support.commands import RunTokcap
from support.made_up import CHAT, FIRST, STREAM, answering, chat, delta, events, pausing, usage
from support.replay import ReplayEngine, replay_engine, until
from support.served import Serving, refused, serving
from token_id_capture.cli.main import Commands
from token_id_capture.cli.serving.settings import WorkerSettings
from token_id_capture.store import TokenCaptureStore


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    async with replay_engine() as running:
        running.handler = answering(chat([5, 6], [-0.1, -0.2]))
        yield running


async def test_what_cannot_work_is_one_line_and_exit_code_2(
    tokcap: RunTokcap, tmp_path: Path, engine: ReplayEngine
) -> None:
    (tmp_path / "text.db").write_text("this is no database, and long enough to be one" * 100)
    new, text = ("-d", str(tmp_path / "new.db")), ("-d", str(tmp_path / "text.db"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = await refused(tokcap, "-u", engine.url, *new, "--port", port)
        assert said.startswith(f"cannot listen on 127.0.0.1:{port} (Address already in use)")
    assert not (tmp_path / "new.db").exists()
    for arguments, beginning in (
        (("-u", f"http://127.0.0.1:{port}", *new), f"nothing listens at http://127.0.0.1:{port} (Connection refused)"),
        (("-u", "engine:8000", *new), "'engine:8000' is not an upstream"),
        (("-u", engine.url, *new, "--engine", "ollama"), "unknown engine 'ollama'"),
        (("-u", engine.url, *text, "--port", "0"), str(tmp_path / "text.db")),
    ):
        assert (await refused(tokcap, *arguments)).startswith(beginning)
    said = await refused(tokcap, "-u", engine.url, *new, "--port", "0", "--no-check", "--free-space-floor", str(2**62))
    assert "fewer than the floor" in said
    assert (await refused(tokcap, "-u", engine.url, *new, "--drain-seconds", "inf")).startswith(
        "TOKCAP_DRAIN_SECONDS: "
    )


@pytest.mark.parametrize("name", ["PORT", "WORKERS", "DRAIN_SECONDS", "BODY_LIMIT"])
def test_a_variable_that_makes_no_sense_is_named_with_its_option(tokcap: RunTokcap, tmp_path: Path, name: str) -> None:
    where = ("-u", "http://127.0.0.1:9", "-d", tmp_path / "new.db")
    done = tokcap("serve", *where, env={f"TOKCAP_{name}": "soon", "COLUMNS": "200"})
    option = f"--{name.lower().replace('_', '-')}"
    assert done.returncode == 2
    assert f"Invalid value for '{option}' (env var: 'TOKCAP_{name}')" in done.stderr


def test_every_setting_of_a_worker_is_an_option_and_every_option_a_variable() -> None:
    options = [one for one in Commands()["serve"].params if one.name != "help"]
    assert {one.name: one.envvar for one in options} == {one.name: f"TOKCAP_{one.name.upper()}" for one in options}
    assert set(WorkerSettings.model_fields) - {"database_id"} <= {one.name for one in options}
    defaults = {name: field.default for name, field in WorkerSettings.model_fields.items() if not field.is_required()}
    named = {one.name: one.default for one in options if one.name in defaults and one.default is not None}
    assert named == {name: defaults[name] for name in named}


async def test_it_listens_where_the_environment_says_and_prints_the_base_url(
    tmp_path: Path, engine: ReplayEngine
) -> None:
    where = {"TOKCAP_HOST": "::1", "TOKCAP_WORKERS": "1", "TOKCAP_LOG_PROBS_MODE": "raw_logprobs"}
    options = ("--session-headers", "x-mine", "--body-limit", "2000")
    async with serving(tmp_path / "captures.db", engine.url, *options, **where) as server:
        assert server.url.startswith("http://[::1]:")
        template = next(line for line in server.before if "OpenAI clients" in line)
        base = template.split()[-1].replace("ROLLOUT", "r1").removeprefix(server.url)
        assert (await server.post(f"{base}/chat/completions", **{"x-mine": "kept"}))[0] == 200
        assert (await server.post(f"{base}/chat/completions", {"messages": "x" * 2000}))[0] == 413
    async with TokenCaptureStore(tmp_path / "captures.db", create=False) as store:
        [stored] = await store.read_entries("r1")
    assert stored.log_probs_mode == "raw_logprobs"
    assert stored.model_extra == {"session_headers": {"x-mine": "kept"}}


async def test_one_process_serves_captures_and_stops_cleanly(tmp_path: Path, engine: ReplayEngine) -> None:
    path = tmp_path / "captures.db"
    for number, database in ((signal.SIGINT, path), (signal.SIGTERM, f"sqlite:///{path}")):
        async with serving(database, engine.url) as server:
            status, body = await server.post(server.base(f"r{number}") + CHAT)
            assert (status, orjson.loads(body)["choices"][0]["token_ids"]) == (200, None)
            code, said = await server.stop(number)
            assert (code, said) == (0, "")
        async with TokenCaptureStore(path, create=False) as store:
            assert len(await store.read_entries(f"r{number}")) == 1


async def test_a_call_in_flight_is_finished_before_the_end(tmp_path: Path, engine: ReplayEngine) -> None:
    go_on = asyncio.Event()
    first, *rest = events(FIRST, delta([10], "stop"), usage(1))
    engine.handler = pausing(first, go_on, b"".join(rest))
    async with serving(tmp_path / "captures.db", engine.url) as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + server.base() + CHAT, json=STREAM) as response:
            await response.content.readuntil(b"\n\n")
            server.process.send_signal(signal.SIGTERM)
            go_on.set()
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        assert await server.ended() == (0, "")


async def test_a_call_that_takes_longer_than_the_shutdown_may_is_cut_off_without_a_traceback(
    tmp_path: Path, engine: ReplayEngine
) -> None:
    released = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    engine.handler = handler
    async with serving(tmp_path / "captures.db", engine.url, "--shutdown-seconds", "0") as server:
        call = asyncio.create_task(server.post(server.base() + CHAT))

        async def dispatched() -> bool:
            return bool(engine.received)

        await until(dispatched)
        code, said = await server.stop(signal.SIGTERM)
        released.set()
        await asyncio.gather(call, return_exceptions=True)
    assert code == 0
    assert "Traceback" not in said
    assert "cut off when the server ended" in said
    async with TokenCaptureStore(tmp_path / "captures.db", create=False) as store:
        (intent,) = (await store.describe_rollout("r1")).intents
        assert intent.outcome is None


async def test_a_database_that_is_removed_is_not_made_anew_by_any_worker_until_a_restart(
    tmp_path: Path, engine: ReplayEngine
) -> None:
    database = tmp_path / "captures.db"
    async with serving(database, engine.url, "--workers", "2") as server:
        assert (await server.post(server.base() + CHAT))[0] == 200
        with contextlib.closing(sqlite3.connect(database)) as connection:
            (pid,) = connection.execute("SELECT pid FROM writers JOIN entries USING (writer_id)").fetchone()
        for suffix in ("", "-wal", "-shm"):
            database.with_name(f"captures.db{suffix}").unlink(missing_ok=True)
        os.kill(pid, signal.SIGKILL)

        async def refuses() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                ready = orjson.loads((await server.get("/readyz"))[1])
                assert (await server.post(server.base() + CHAT))[0] == 503
                return bool(ready["why"]["database"] == "file_replaced")
            return False  # of the worker that was killed

        # Whichever worker answers: the one that was there, or the other's successor.
        for _ in range(8):
            await until(refuses, 30)
        assert not database.exists()
        await server.stop(signal.SIGTERM)
    async with serving(database, engine.url) as server:
        assert (await server.post(server.base() + CHAT))[0] == 200


async def test_two_workers_share_the_database_and_one_that_is_killed_is_replaced(
    tmp_path: Path, engine: ReplayEngine
) -> None:
    async with (
        serving(tmp_path / "captures.db", engine.url, "--workers", "2") as server,
        TokenCaptureStore(tmp_path / "captures.db") as store,
    ):

        async def served() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                return (await server.post(server.base() + CHAT))[0] == 200
            return False

        first, second = await until(lambda: opened(server, store, 2), 30)
        assert await served()
        os.kill(first, signal.SIGKILL)
        (third,) = await until(lambda: opened(server, store, 3), 30) - {first, second}
        os.kill(second, signal.SIGKILL)
        await until(served, 30)
        assert len(await store.read_entries("r1")) == 2
        code, said = await server.stop(signal.SIGTERM)
        assert code == 0
        assert f"worker [{first}] died and is replaced" in said
        assert "Traceback" not in said
        assert not any(runs(pid) for pid in (first, second, third))


async def test_on_sighup_each_worker_is_replaced_once_its_successor_serves(
    tmp_path: Path, engine: ReplayEngine
) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("first")
    async with (
        serving(tmp_path / "captures.db", engine.url, "--workers", "2", "--api-key-file", str(key)) as server,
        TokenCaptureStore(tmp_path / "captures.db") as store,
    ):

        async def statuses(sent: str) -> set[int]:
            return {(await server.get("/v1/models", authorization=f"Bearer {sent}"))[0] for _ in range(8)}

        async def only_the_second() -> bool:
            # Until both workers are gone, all requests may happen to reach the one that was replaced first.
            if any(runs(pid) for pid in workers):
                return False
            with contextlib.suppress(aiohttp.ClientError):
                return await statuses("first") == {401} and await statuses("second") == {200}
            return False

        async def said() -> bool:
            return any("did not start" in line for line in server.lines)

        workers = await until(lambda: opened(server, store, 2), 30)
        assert await statuses("first") == {200}
        key.write_text("second")
        server.process.send_signal(signal.SIGHUP)
        await until(only_the_second, 60)
        key.write_text("two words")
        server.process.send_signal(signal.SIGHUP)
        await until(said, 30)
        assert await statuses("second") == {200}
        assert (await server.stop(signal.SIGTERM))[0] == 0


async def test_the_server_ends_where_no_worker_can_start(tmp_path: Path, engine: ReplayEngine) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("good")
    async with (
        serving(tmp_path / "captures.db", engine.url, "--workers", "2", "--api-key-file", str(key)) as server,
        TokenCaptureStore(tmp_path / "captures.db") as store,
    ):
        first, _ = await until(lambda: opened(server, store, 2), 30)
        key.unlink()
        os.kill(first, signal.SIGKILL)
        code, said = await server.ended()
        assert code == 1
        assert "cannot read the key file" in said
        assert "could not start, so the server ends" in said
        assert "Traceback" not in said


async def opened(server: Serving, store: TokenCaptureStore, count: int) -> set[int]:
    """The workers that have opened the store, once they are so many."""
    pids = await writer_pids(server, store)
    return pids if len(pids) == count else set()


def runs(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def writer_pids(server: Serving, store: TokenCaptureStore) -> set[int]:
    """The workers that have opened the store for writing, also those that are gone."""
    with contextlib.closing(sqlite3.connect(f"file:{store.database}?mode=ro", uri=True)) as connection:
        pids = {pid for (pid,) in connection.execute("SELECT pid FROM writers")}
    return pids - {os.getpid(), server.process.pid}


async def test_workers_end_when_their_parent_is_killed_and_take_its_files_with_them(
    tmp_path: Path, engine: ReplayEngine
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    async with (
        serving(tmp_path / "captures.db", engine.url, "--workers", "2", TMPDIR=str(temporary)) as server,
        TokenCaptureStore(tmp_path / "captures.db") as store,
    ):

        async def served() -> set[int]:
            await server.post(server.base() + CHAT)
            return await writer_pids(server, store)

        await until(served, 30)
        assert len(os.listdir(temporary)) == 1
        server.process.kill()
        await server.process.wait()

        async def port_is_free() -> bool:
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", int(server.url.rpartition(":")[2])))
                probe.listen()
                return True
            return False

        await until(port_is_free, 30)
        assert os.listdir(temporary) == []


async def test_settings_of_the_environment_reach_the_workers(tmp_path: Path, engine: ReplayEngine) -> None:
    environment = {"TOKCAP_BODY_LIMIT": "100", "TOKCAP_LOG_PROBS_MODE": "raw_logprobs", "TOKCAP_ENGINE": "vllm"}
    async with serving(tmp_path / "captures.db", engine.url, **environment) as server:
        assert (await server.post(CHAT, {"x": "y" * 200}))[0] == 413
        assert (await server.post(server.base() + CHAT))[0] == 200
        async with TokenCaptureStore(tmp_path / "captures.db", create=False) as store:
            (entry,) = await store.read_entries("r1")
        assert entry.log_probs_mode == "raw_logprobs"


async def test_it_can_start_before_the_engine(tmp_path: Path, engine: ReplayEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    upstream = f"http://127.0.0.1:{port}"
    async with serving(tmp_path / "captures.db", upstream) as server:
        status, body = await server.post(server.base() + CHAT)
        assert status == 502
        assert orjson.loads(body)["error"]["message"] == "The engine cannot be reached."
