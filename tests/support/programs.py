"""What the child processes of these tests do. Each function is one program; see ``child_server``."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TextIO

from token_id_capture.errors import TokenCaptureError
from token_id_capture.records import TokenEntry
from token_id_capture.store import PinnedWalWarning, TokenCaptureStore
from token_id_capture.store.copying.databases import copy_database
from token_id_capture.store.file import connections as engine
from token_id_capture.store.file.lock import WriterLock
from token_id_capture.store.local import LocalFile
from token_id_capture.store.write import writer

Say = Callable[[str], None]


def entry(rollout_id: str, model_call_id: str, tokens: int = 4) -> TokenEntry:
    """A call of which prompt and generation have ``tokens`` ids each, told apart by its call id."""
    first = sum(model_call_id.encode())
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        prompt_token_ids=range(first, first + tokens),
        generation_token_ids=range(tokens),
        generation_log_probs=[-1.0 / (1 + number) for number in range(tokens)],
    )


def speaker(path: str) -> Say:
    """Writes a line of what was acknowledged, at once and whole: SIGKILL cannot take it back."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return lambda line: _write(descriptor, f"{line}\n".encode())


def _write(descriptor: int, line: bytes) -> None:
    assert os.write(descriptor, line) == len(line)


def said(path: Path) -> list[str]:
    """The whole lines of a speaker so far."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def wait_for_go(go: str) -> None:
    """Wait until the test makes this file: all who wait for it go on together."""
    while not os.path.exists(go):
        time.sleep(0.0005)


def fork() -> int:
    """``os.fork``, of which newer Pythons warn in a process with threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def create(database: str, acknowledged: str) -> None:
    """Make a new database and close it."""

    async def main() -> None:
        async with TokenCaptureStore(database):
            speaker(acknowledged)("open")

    asyncio.run(main())
    speaker(acknowledged)("close")


def copy(source: str, target: str) -> None:
    """Copy all rollouts."""
    copy_database(source, target, include_open=True)


def lifecycle(database: str, acknowledged: str) -> None:
    """Every kind of write, one after the other, and a close."""
    say = speaker(acknowledged)

    async def main() -> None:
        async with TokenCaptureStore(database) as store:
            say("open")
            await store.begin_call("first", "a")
            say("begin first a")
            await store.put(entry("first", "a"))
            say("put first a")
            await store.begin_call("first", "lost")
            say("begin first lost")
            await asyncio.gather(*(store.put(entry("first", f"group{n}", 2000)) for n in range(3)))
            for n in range(3):
                say(f"put first group{n}")
            snapshot = await store.freeze("first")
            say("freeze first")
            await store.put(entry("second", "b"))
            say("put second b")
            say("dropping first")
            await store.drop("first", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
            say("drop first")
            await store.mark_incomplete("second", "b", "lost_stream")
            say("mark second")
        say("close")

    asyncio.run(main())


def put_many(
    database: str, acknowledged: str, rollout_id: str, count: int, tokens: int = 4, coroutines: int = 50, go: str = ""
) -> None:
    """Put ``count`` calls, many at a time, and say each that is acknowledged, and each warning."""
    say = speaker(acknowledged)
    warnings.simplefilter("always", PinnedWalWarning)
    warnings.showwarning = lambda message, category, *rest: say(f"{category.__name__}: {message}")
    numbers = iter(range(count))

    async def work(store: TokenCaptureStore) -> None:
        for number in numbers:
            began = time.monotonic()
            await store.put(entry(rollout_id, str(number), tokens))
            say(f"{number} {time.monotonic():.6f} {time.monotonic() - began:.6f}")

    async def main() -> None:
        async with TokenCaptureStore(database) as store:
            say("open")
            if go:
                await asyncio.to_thread(wait_for_go, go)
            await asyncio.gather(*(work(store) for _ in range(coroutines)))
            say("done")

    asyncio.run(main())


def open_together(database: str, name: str, go: str, waiting: str) -> None:
    """Wait for the signal, then open the database for the first time and store one call."""
    speaker(waiting)(name)

    async def main() -> None:
        async with TokenCaptureStore(database) as store:
            await store.put(entry(name, "only"))

    wait_for_go(go)
    asyncio.run(main())


def hold_writer_lock(database: str, acknowledged: str) -> None:
    """Take the writer lock and keep it."""
    with WriterLock(Path(database)):
        speaker(acknowledged)("held")
        time.sleep(3600)


def obey(database: str, orders: str, answers: str) -> None:
    """Do what each line of ``orders`` says, and write what came of it: see ``Puppet``."""
    say = speaker(answers)

    async def attempt(work: Awaitable[Any]) -> str:
        try:
            await work
        except TokenCaptureError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    async def do(store: TokenCaptureStore, method: str, *arguments: Any) -> Any:
        if method == "put":
            # All at once, so that they share commits; the answer is a list of errors.
            rollout_id, calls, tokens = arguments
            return await asyncio.gather(*(attempt(store.put(entry(rollout_id, call, tokens))) for call in calls))
        if method == "freeze":
            snapshot = await store.freeze(*arguments)
            calls = [stored.model_call_id for stored in snapshot.entries]
            return [snapshot.snapshot_id, snapshot.version, snapshot.incomplete, calls]
        if method == "drop":
            return await store.drop(arguments[0], snapshot_id=arguments[1], version=arguments[2])
        return await attempt(getattr(store, method)(*arguments))

    async def main(lines: TextIO) -> None:
        async with TokenCaptureStore(database) as store:
            while line := await asyncio.to_thread(lines.readline):
                say(json.dumps(await do(store, *json.loads(line))))

    with open(orders) as lines:
        asyncio.run(main(lines))


def end_without_close(database: str, acknowledged: str) -> None:
    """Store and read, then end as a program does that forgot to close, with a read under way."""
    say = speaker(acknowledged)
    store = TokenCaptureStore(database)
    kept.append(store)

    async def main() -> None:
        await store.put(entry("open", "a"))
        say("put open a")
        await store.read_entries("open")
        asyncio.create_task(store.read_entries("open"))  # noqa: RUF006
        asyncio.create_task(store.put(entry("open", "b")))  # noqa: RUF006
        await asyncio.sleep(0)

    asyncio.run(main())
    say("end")
    sys.stdout.flush()


kept: list[object] = []


def fork_and_close(database: str, acknowledged: str) -> None:
    """Fork with an open store: the child stores, the parent closes, the child stores again."""
    say = speaker(acknowledged)
    store = TokenCaptureStore(database)
    # One loop for all, as close() is to find what the first calls opened.
    loop = asyncio.new_event_loop()

    def put(call: str) -> None:
        loop.run_until_complete(store.put(entry("shared", call)))
        say(f"put {call}")

    put("parent")
    loop.run_until_complete(store.read_entries("shared"))
    parent_is_done, child_has_put = os.pipe(), os.pipe()
    child = fork()
    if child == 0:
        loop = asyncio.new_event_loop()
        put("child")
        loop.run_until_complete(store.read_entries("shared"))
        os.write(child_has_put[1], b"1")
        os.read(parent_is_done[0], 1)
        put("child again")
        os.kill(os.getpid(), signal.SIGKILL)
    put("parent again")
    os.read(child_has_put[0], 1)
    loop.run_until_complete(store.close())
    say("closed")
    os.write(parent_is_done[1], b"1")
    os.waitpid(child, 0)
    loop.close()


def fork_under_load(database: str, acknowledged: str, forks: int) -> None:
    """Fork again and again while many callers put; each child stores one call through the same store."""
    say = speaker(acknowledged)
    store = TokenCaptureStore(database)
    running = True

    async def flood(name: int) -> None:
        for number in itertools.count():
            if not running:
                return
            await store.put(entry("parent", f"{name}.{number}", 50))
            say(f"parent {name}.{number}")

    async def child(number: int) -> None:
        await store.put(entry("children", str(number)))
        say(f"children {number}")

    async def main() -> None:
        nonlocal running
        floods = [asyncio.create_task(flood(name)) for name in range(40)]
        pids = []
        for number in range(forks):
            await asyncio.sleep(0.01)
            pid = fork()
            if pid == 0:
                code = 1
                try:
                    asyncio.run(child(number))
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        codes = [await asyncio.to_thread(os.waitpid, pid, 0) for pid in pids]
        running = False
        await asyncio.gather(*floods)
        await store.close()
        assert all(status == 0 for _, status in codes), codes

    asyncio.run(main())


def fork_and_wait(database: str, acknowledged: str) -> None:
    """Fork with an open store a child that never uses it, and say its pid."""
    store = TokenCaptureStore(database)
    kept.append(store)
    asyncio.run(store.put(entry("shared", "a")))
    asyncio.run(store.read_entries("shared"))
    child = fork()
    if child == 0:
        time.sleep(3600)
    speaker(acknowledged)(str(child))
    time.sleep(3600)


def fork_while_reading(database: str, acknowledged: str) -> None:
    """Fork while a read is under way, which nobody can wait for: what the child is told."""
    say = speaker(acknowledged)
    store = TokenCaptureStore(database)

    async def main() -> None:
        await store.put(entry("shared", "a"))
        assert isinstance(store._backend, LocalFile)
        reader = await store._backend.live_reader()
        async with reader.connect():
            child = fork()
            if child == 0:
                try:
                    asyncio.run(TokenCaptureStore(database).put(entry("shared", "b")))
                except TokenCaptureError as error:
                    say(f"{type(error).__name__}: {error}")
                finally:
                    os._exit(0)
            await asyncio.to_thread(os.waitpid, child, 0)
        await store.put(entry("shared", "c"))
        await store.close()
        say("closed")

    asyncio.run(main())


def busy_life(database: str, acknowledged: str, synchronous: int) -> None:
    """Groups of puts, marks, freezes and drops, with checkpoints in between, a close, and more after it."""
    say = speaker(acknowledged)
    engine.SETTINGS["synchronous"] = synchronous
    writer.CHECKPOINT_BYTES, writer.TRUNCATE_BYTES = 300_000, 600_000  # type: ignore[misc]

    async def put(store: TokenCaptureStore, rollout_id: str, call: str) -> None:
        await store.put(entry(rollout_id, call, 200))
        say(f"put {rollout_id} {call}")

    async def part(rollout_id: str) -> None:
        async with TokenCaptureStore(database) as store:
            say("opened")
            for number in range(12):
                await asyncio.gather(*(put(store, rollout_id, f"{number}.{n}") for n in range(dice.randrange(1, 6))))
            await store.mark_incomplete(rollout_id, reason=f"lost_stream: {rollout_id}")
            say(f"mark {rollout_id} {rollout_id}")
            snapshot = await store.freeze(rollout_id)
            say(f"freeze {rollout_id}")
            if rollout_id == "first":
                say("dropping first")
                await store.drop("first", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
                say("drop first")
        say("closed")

    dice = random.Random(5)
    for rollout_id in ("first", "second", "third"):
        asyncio.run(part(rollout_id))


def sync_each(database: str, acknowledged: str) -> None:
    """Puts one after the other, then 64 that wait at the writer lock together; each says when it was handed over."""
    say = speaker(acknowledged)
    writer.IDLE_SECONDS = 3600.0  # type: ignore[misc]

    async def put(store: TokenCaptureStore, call: str) -> None:
        say(f"hand {call}")
        await store.put(entry("first", call))
        say(f"put {call}")

    async def main() -> None:
        async with TokenCaptureStore(database) as store:
            for number in range(20):
                await put(store, str(number))
            writer_lock = WriterLock(Path(database))
            with writer_lock:
                puts = [asyncio.create_task(put(store, f"group{number}")) for number in range(64)]
                await asyncio.sleep(0)
                say("together")
            await asyncio.gather(*puts)
            say("done")
            writer_lock.close()

    asyncio.run(main())
