"""``tokcap serve`` in operation: what it refuses at the start, its log, its numbers over workers, its end."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from support.commands import RunTokcap
from support.made_up import CHAT, FIRST, STREAM, answering, chat, delta, events, pausing, usage
from support.replay import ReplayEngine, replay_engine, stream, until
from support.served import Serving, serving
from token_id_capture.store import TokenCaptureStore

KEY = "gateway-key-5f1e"
ENGINE_KEY = "engine-key-77aa"
PROMPT = "a prompt that no log may quote"


@pytest.fixture
async def engine() -> AsyncIterator[ReplayEngine]:
    async with replay_engine() as running:
        running.handler = answering(chat([5, 6], [-0.1, -0.2]))
        yield running


def key_file(directory: Path, content: str, mode: int = 0o600) -> Path:
    path = directory / f"key-{len(list(directory.iterdir()))}"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_what_would_be_unsafe_is_one_line_and_exit_code_2(tokcap: RunTokcap, tmp_path: Path) -> None:
    serve = ("serve", "-u", "http://127.0.0.1:9", "-d", tmp_path / "new.db", "--port", 0, "--no-check")
    missing = tmp_path / "missing"
    good, empty = key_file(tmp_path, KEY), key_file(tmp_path, "\n")
    for arguments, beginning in (
        (("--host", "0.0.0.0"), "0.0.0.0 can be reached from other machines: give --api-key-file, or --insecure"),
        (("--host", "::", "--upstream-api-key-file", good), ":: can be reached from other machines"),
        (("--host", "127.0.0.1", "--api-key-file", missing), f"cannot read the key file {missing}: No such file"),
        (("--upstream-api-key-file", empty), f"the key file {empty} is empty"),
        (("-u", "http://user:hush@127.0.0.1:9"), "the upstream URL contains a user or password"),
    ):
        done = tokcap(*serve, *arguments)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith(f"tokcap: {beginning}"), done.stderr
        assert done.stderr.count("\n") == 1
        assert "hush" not in done.stderr
    assert not (tmp_path / "new.db").exists()


async def test_keys_are_read_from_files_and_the_log_is_json_with_ids_and_no_secrets(
    tmp_path: Path, engine: ReplayEngine
) -> None:
    ours, theirs = key_file(tmp_path, f"  {KEY}\n", 0o644), key_file(tmp_path, ENGINE_KEY)
    options = ("--api-key-file", str(ours), "--log-format", "json", "--access-log")
    environment = {"TOKCAP_UPSTREAM_API_KEY_FILE": str(theirs)}
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}]}
    key = {"authorization": f"Bearer {KEY}"}
    async with serving(tmp_path / "captures.db", engine.url, *options, **environment) as server:
        assert (await server.post(server.base() + CHAT, body))[0] == 401
        assert (await server.get("/readyz"))[0] == 200
        assert (await server.post(server.base() + CHAT + "?secret=1", body, **key))[0] == 200
        engine.handler = answering({"error": f"CUDA died on {PROMPT!r} of {KEY}"}, 500)
        assert (await server.post(server.base("r2") + CHAT, body, **{"x-api-key": KEY}))[0] == 500
        code, said = await server.stop(signal.SIGTERM)
        assert code == 0
    received = [value for request in engine.received for _, value in request.headers]
    assert [value for value in received if KEY in value] == []
    assert received.count(f"Bearer {ENGINE_KEY}") == 2
    start = [json.loads(line) for line in server.before]
    warned = [line["message"] for line in start if line["level"] == "warning"]
    assert f"every user of this machine may read or change the key in {ours}: chmod 600 {ours}" in warned
    assert str(theirs) not in "".join(server.before)

    everything = "".join(server.before) + said
    assert not [word for word in (KEY, ENGINE_KEY, PROMPT, "secret", "CUDA") if word in everything]
    lines = [start[-1], *map(json.loads, said.splitlines())]
    assert re.fullmatch(r"listening on http://127.0.0.1:\d+", lines[0]["message"])
    assert all({"time", "level", "logger", "process", "message"} <= set(line) for line in lines)
    calls = [line for line in lines if line.get("path") == CHAT]
    assert [(line["status"], line["rollout_id"], line["method"]) for line in calls] == [
        (200, "r1", "POST"),
        (500, "r2", "POST"),
    ]
    (marked,) = [line for line in lines if line["level"] == "warning"]
    assert marked["message"].endswith("is not captured: unknown_outcome")
    async with TokenCaptureStore(tmp_path / "captures.db", create=False) as store:
        (flag,) = (await store.describe_rollout("r2")).flags
        assert (flag.model_call_id, "r2") == (marked["model_call_id"], marked["rollout_id"])
        assert "CUDA died" in flag.detail


async def numbers(server: Serving) -> dict[str, float]:
    status, text = await server.get("/metrics")
    assert status == 200
    samples = re.findall(r"^(tokcap_[^ ]+) (\S+)$", text.decode(), re.MULTILINE)
    assert len(samples) == len(dict(samples))
    return {name: float(value) for name, value in samples}


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where a server puts what only it needs."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    return directory


async def test_a_server_on_all_addresses_announces_the_name_of_its_machine(
    tmp_path: Path, engine: ReplayEngine
) -> None:
    async with serving(tmp_path / "captures.db", engine.url, "--host", "0.0.0.0", "--insecure") as server:
        (base,) = (line.split()[-1] for line in server.before if "OpenAI clients" in line)
    port = server.url.rpartition(":")[2]
    assert base == f"http://{socket.gethostname()}:{port}/ng-rollout/ROLLOUT/training-token-capture/v1"


CAPTURED = 'tokcap_calls_total{outcome="captured",reason=""}'


async def test_numbers_are_those_of_all_workers_also_after_they_died(
    tmp_path: Path, temporary: Path, engine: ReplayEngine
) -> None:
    async def hold(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(events(FIRST)[0])
        await asyncio.Event().wait()
        return response

    options = ("--workers", "2", "--host", "0.0.0.0", "--insecure")
    # Somebody else's directory is not used.
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "TMPDIR": str(temporary)}
    async with serving(tmp_path / "captures.db", engine.url, *options, **environment) as server:

        async def workers() -> set[int]:
            names = glob.glob("tokcap-metrics-*/counter_*.db", root_dir=temporary)
            pids = {int(name.rpartition("_")[2].removesuffix(".db")) for name in names}
            return pids if len(pids) == 2 else set()

        first, second = await until(workers, 60)
        (directory,) = os.scandir(temporary)
        assert directory.stat().st_mode & 0o777 == 0o700
        await asyncio.gather(*(server.post(server.base(f"r{number}") + CHAT) for number in range(20)))
        for seen in [await numbers(server) for _ in range(6)]:
            assert (seen[CAPTURED], seen["tokcap_calls_begun_total"]) == (20, 20)
            assert seen["tokcap_put_seconds_count"] == 20
            assert seen["tokcap_wal_bytes"] > 0

        engine.handler = hold
        async with aiohttp.ClientSession() as session:
            for _ in range(8):
                held = await session.post(server.url + server.base("held") + CHAT, json=STREAM)
                await held.content.readany()
            assert (await numbers(server))["tokcap_streams_in_flight"] == 8
            for pid in (first, second):
                os.kill(pid, signal.SIGKILL)

            async def gone() -> bool:
                with contextlib.suppress(aiohttp.ClientError):
                    seen = await numbers(server)
                    return seen["tokcap_streams_in_flight"] == seen["tokcap_calls_in_flight"] == 0
                return False

            await until(gone, 60)
        after = await numbers(server)
        assert (after[CAPTURED], after["tokcap_calls_begun_total"]) == (20, 28)
        assert (await server.stop(signal.SIGTERM))[0] == 0
    assert os.listdir(temporary) == []
    assert glob.glob("*_*.db", root_dir=tmp_path) == []


async def test_while_the_last_calls_are_finished_nobody_else_is_let_in(tmp_path: Path, engine: ReplayEngine) -> None:
    go_on = asyncio.Event()
    first, *rest = events(FIRST, delta([10], "stop"), usage(1))
    engine.handler = pausing(first, go_on, b"".join(rest))
    async with serving(tmp_path / "captures.db", engine.url, "--workers", "2") as server:
        async with aiohttp.ClientSession() as session:
            responses = [await session.post(server.url + server.base(f"r{n}") + CHAT, json=STREAM) for n in range(6)]
            server.process.send_signal(signal.SIGTERM)

            async def refused() -> bool:
                try:
                    await server.get("/healthz")
                except aiohttp.ClientConnectorError:
                    return True
                except aiohttp.ClientError:
                    return False
                return False

            await until(refused)
            assert server.process.returncode is None
            go_on.set()
            for response in responses:
                assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        assert await server.ended() == (0, "")
    async with TokenCaptureStore(tmp_path / "captures.db", create=False) as store:
        assert [len(await store.read_entries(f"r{number}")) for number in range(6)] == [1] * 6


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux's")
async def test_a_client_that_reads_nothing_is_gone_after_its_time_and_its_call_is_complete(
    tmp_path: Path, engine: ReplayEngine
) -> None:
    # More than the buffers in between take in.
    parts = [delta([token], "stop" if token == 99 else None) for token in range(100)]
    for part in parts:
        part["choices"][0]["delta"]["content"] = "x" * 200_000

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, events(FIRST, *parts, usage(100)))

    engine.handler = handler
    async with serving(tmp_path / "captures.db", engine.url, TOKCAP_CLIENT_TIMEOUT="0.5") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]), limit=1000)
        transport: asyncio.Transport = reader._transport  # type: ignore[attr-defined]
        transport.pause_reading()
        body = json.dumps(STREAM)
        head = f"POST {server.base()}{CHAT} HTTP/1.1\r\nHost: g\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        async with TokenCaptureStore(tmp_path / "captures.db") as store:

            async def stored() -> bool:
                return any(summary.calls for summary in await store.list_rollouts())

            await until(stored, 30)
            (entry,) = await store.read_entries("r1")
            assert entry.generation_token_ids == list(range(100))
            assert not (await store.freeze("r1")).incomplete

        async def ended() -> bool:
            return (await numbers(server))["tokcap_calls_in_flight"] == 0

        await until(ended)
        # The connection is gone, as the client finds out once it reads.
        transport.resume_reading()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
