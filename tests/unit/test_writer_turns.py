"""What an event loop asks for in one turn is handed over together, and nothing of it is lost on the way."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table
from sqlalchemy.dialects.sqlite import insert

from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.codec import pack
from token_id_capture.store.write.prefix_cache import RecentSequences
from token_id_capture.store.write.queue import Batch, Job, Turns
from token_id_capture.store.write.statements import Statement
from token_id_capture.tokens import TokenIds


def entry(model_call_id: str, rollout_id: str = "first") -> TokenEntry:
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        prompt_token_ids=[1],
        generation_token_ids=[2],
        generation_log_probs=[-0.5],
    )


def _nothing(batch: Batch, jobs: list[Job]) -> None:
    raise AssertionError("only the jobs are counted here")


def test_a_job_that_is_asked_for_while_another_thread_ends_the_turn_is_taken_once() -> None:
    turns = Turns()
    taken: list[Job] = []
    ending = threading.Thread(target=lambda: taken.extend(turns.end_all()))

    class Interrupted(asyncio.SelectorEventLoop):
        """The other thread comes where the turn has begun, and the job is not in it yet."""

        def call_soon(self, *given: Any, **more: Any) -> asyncio.Handle:  # type: ignore[override]
            handle = super().call_soon(*given, **more)
            ending.start()
            ending.join(timeout=0.05)
            return handle

    with closing(Interrupted()) as loop:
        job = Job(_nothing, None, 1, loop, loop.create_future())
        turns.add(job, lambda loop: None)
        ending.join()
        taken += turns.end(loop)
    assert taken == [job]


@pytest.mark.parametrize("later", ["put", "close"])
def test_what_a_loop_asked_for_just_before_it_was_closed_is_stored(tmp_path: Path, later: str) -> None:
    store = TokenCaptureStore(tmp_path / "captures.db")
    asyncio.run(store.open())
    loop = asyncio.new_event_loop()
    asking = store.put(entry("asked"))
    task = loop.create_task(asking)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        task.cancel()  # nobody waits any more
    asking.close()

    async def stored() -> list[str]:
        async with TokenCaptureStore(store.database) as other:
            return [stored.model_call_id for stored in await other.read_entries("first")]

    if later == "put":
        asyncio.run(store.put(entry("later")))
        assert asyncio.run(stored()) == ["asked", "later"]
    asyncio.run(store.close())
    assert "asked" in asyncio.run(stored())


def test_threads_that_come_at_once_share_one_writer_which_ends_with_the_store(tmp_path: Path) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(4):
            store = TokenCaptureStore(tmp_path / f"{number}.db")
            barrier = threading.Barrier(6)

            def use(call: str, store: TokenCaptureStore = store, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                asyncio.run(store.put(entry(call)))

            threads = [threading.Thread(target=use, args=(str(call),)) for call in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            asyncio.run(store.close())
    finally:
        sys.setswitchinterval(interval)
    writers = {f"tokcap-writer {number}.db" for number in range(4)}
    assert not [thread for thread in threading.enumerate() if thread.name in writers]


async def test_a_mark_that_is_cancelled_in_the_turn_that_it_was_asked_for_in_is_made_all_the_same(
    tmp_path: Path,
) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("a"))
        mark = asyncio.create_task(store.mark_incomplete("first", reason="lost_stream"))
        await asyncio.sleep(0)
        mark.cancel()
        with pytest.raises(asyncio.CancelledError):
            await mark
        assert (await store.freeze("first")).incomplete


@pytest.mark.parametrize("parameters", [1, 3, 7, 250_000])
def test_many_rows_are_inserted_whatever_number_of_parameters_sqlite_takes(parameters: int) -> None:
    table = Table("pairs", MetaData(), Column("a", Integer), Column("b", Integer))
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE pairs (a, b)")
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, max(parameters, 2))
        rows = [{"a": number, "b": -number} for number in range(200)]
        Statement(insert(table)).run_many(connection, rows)
        assert connection.execute("SELECT a, b FROM pairs").fetchall() == [(row["a"], row["b"]) for row in rows]


def test_many_short_sequences_are_counted_with_what_is_around_them() -> None:
    recent = RecentSequences(capacity=100_000)
    for number in range(1_000):
        recent.remember("incarnation", pack(entry("a", f"rollout-{number}")))
    prompt = TokenIds([1, 2, 3])
    assert recent.prefix_of("rollout-999", prompt) is not None
    assert recent.prefix_of("rollout-0", prompt) is None
