"""The store finds the call that a request continues, from any process, as long as the rollout is open."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.call_trees import call
from token_id_capture.errors import CorruptCaptureError
from token_id_capture.protocols import RemembersHistories
from token_id_capture.provenance import Continuity, HistoryLink, Mode, Policy
from token_id_capture.store import TokenCaptureStore


def link(name: str, **more: object) -> HistoryLink:
    return HistoryLink(name.encode().ljust(16, b"-"), **{"reasoning": b"", "call_ids": b"", "ended": True, **more})  # type: ignore[arg-type]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TokenCaptureStore]:
    async with TokenCaptureStore(tmp_path / "captures.db") as opened:
        yield opened


def rows(store: TokenCaptureStore) -> int:
    with contextlib.closing(sqlite3.connect(store.database)) as connection:
        found: int = connection.execute("SELECT count(*) FROM call_histories").fetchone()[0]
        return found


async def test_a_call_is_found_by_its_chain_and_by_no_other(store: TokenCaptureStore) -> None:
    assert isinstance(store, RemembersHistories)
    await store.put(call("a", [1], [2]), link("one", reasoning=b"r", call_ids=b"c", ended=False))
    await store.put(call("b", [1, 2, 3], [4]))
    await store.put(call("c", [1, 2, 3], [5], rollout_id="other"), link("one"))
    (found,) = await store.find_calls("r", [link("one").chain, link("two").chain])
    assert (found.model_call_id, found.prompt_length) == ("a", 1)
    assert found.link == link("one", reasoning=b"r", call_ids=b"c", ended=False)
    assert await store.find_calls("r", [link("two").chain]) == []
    assert await store.find_calls("r", []) == []
    assert await store.find_calls("nobody", [link("one").chain]) == []


async def test_calls_with_one_chain_come_with_the_order_of_their_storing(store: TokenCaptureStore) -> None:
    for name in ("z", "m", "a"):
        await store.put(call(name, [1], [2], [-0.1]), link("one"))
    found = await store.find_calls("r", [link("one").chain])
    assert [one.model_call_id for one in sorted(found, key=lambda one: one.order)] == ["z", "m", "a"]


async def test_of_many_chains_all_are_found(store: TokenCaptureStore) -> None:
    for number in range(20):
        await store.put(call(f"c{number}", [number], [1]), link(f"n{number}"))
    for count in (1, 2, 3, 255, 256, 257, 600):
        chains = [link(f"n{number}").chain for number in range(count)]
        found = {one.model_call_id for one in await store.find_calls("r", chains)}
        assert found == {f"c{number}" for number in range(min(count, 20))}


async def test_what_was_not_stored_is_not_found(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1], [2]), link("one"))
    await store.put(call("a", [1], [2]), link("two"))  # the same payload again
    assert await store.find_calls("r", [link("two").chain]) == []
    with pytest.raises(ValueError):
        await store.put(call("a", [1], [3]), link("two"))  # another payload
    assert await store.find_calls("r", [link("two").chain]) == []
    assert rows(store) == 1


async def test_a_freeze_forgets_the_links_of_its_rollout_alone(store: TokenCaptureStore) -> None:
    for rollout_id in ("r", "other"):
        await store.put(call("a", [1], [2], rollout_id=rollout_id), link("one"))
    await store.freeze("r")
    assert await store.find_calls("r", [link("one").chain]) == []
    assert len(await store.find_calls("other", [link("one").chain])) == 1
    assert rows(store) == 1


@pytest.mark.parametrize("remove", ["retire", "delete"])
async def test_an_open_rollout_that_is_removed_leaves_no_link(store: TokenCaptureStore, remove: str) -> None:
    await store.put(call("a", [1], [2]), link("one"))
    await getattr(store, remove)(["r"])
    assert rows(store) == 0


async def test_the_tokens_of_a_call_come_from_memory_and_from_the_file_alike(store: TokenCaptureStore) -> None:
    prompt: list[int] = [7]
    for turn in range(12):
        await store.put(call(f"c{turn}", prompt, [turn, 5]), link(f"n{turn}"))
        prompt = [*prompt, turn, 5, 9]
    async with TokenCaptureStore(store.database) as another:
        for turn in range(12):
            expected = [7, *(token for earlier in range(turn) for token in (earlier, 5, 9)), turn, 5]
            assert await store.sequence_of("r", f"c{turn}") == expected
            assert await another.sequence_of("r", f"c{turn}") == expected
        assert await another.sequence_of("r", "nothing") is None


async def test_damaged_tokens_are_never_given_out(store: TokenCaptureStore) -> None:
    await store.put(call("a", [1], [2]), link("one"))
    await store.put(call("b", [1, 2, 3], [4]), link("two"))
    with contextlib.closing(sqlite3.connect(store.database, isolation_level=None)) as connection:
        connection.execute("UPDATE entries SET generation = x'09000000' WHERE model_call_id = 'a'")
    async with TokenCaptureStore(store.database) as another:
        with pytest.raises(CorruptCaptureError, match="'a' of rollout 'r' is damaged: its tokens"):
            await another.sequence_of("r", "b")


async def test_a_link_is_there_after_the_process_that_stored_it_was_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, signal, sys\n"
        "from token_id_capture.records import TokenEntry\n"
        "from token_id_capture.provenance import HistoryLink\n"
        "from token_id_capture.store import TokenCaptureStore\n"
        "async def main():\n"
        "    store = TokenCaptureStore(sys.argv[1])\n"
        "    entry = TokenEntry(rollout_id='r', model_call_id='a', prompt_token_ids=[1], generation_token_ids=[2],\n"
        "                       generation_log_probs=[-1.0])\n"
        "    await store.put(entry, HistoryLink(b'0123456789abcdef', b'', b'', True))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    path = tmp_path / "captures.db"
    process = await asyncio.create_subprocess_exec(sys.executable, "-W", "ignore", "-c", program, path)
    await process.wait()
    async with TokenCaptureStore(path) as store:
        (found,) = await store.find_calls("r", [b"0123456789abcdef"])
        assert await store.sequence_of("r", found.model_call_id) == [1, 2]


async def test_how_a_prompt_was_made_is_stored_with_the_call_and_shown_by_the_view(store: TokenCaptureStore) -> None:
    spliced = Continuity(Policy.EXACT, Mode.SPLICED, parent_call_id="a", kept=2, added=1, diverges_at=1)
    await store.put(call("a", [1], [2], continuity=Continuity(Policy.EXACT, Mode.PLAIN, "first")))
    await store.put(call("b", [1, 2, 3], [4], continuity=spliced))
    await store.put(call("c", [9], [4]))
    assert [entry.continuity for entry in await store.read_entries("r")][1:] == [spliced, None]
    with contextlib.closing(sqlite3.connect(store.database)) as connection:
        shown = connection.execute("SELECT continuity FROM call_chain ORDER BY stored_order").fetchall()
    assert shown == [("first",), ("spliced",), (None,)]


@pytest.mark.alone
async def test_a_look_up_among_a_hundred_thousand_rollouts_takes_a_fraction_of_a_millisecond(
    store: TokenCaptureStore,
) -> None:
    await store.put(call("a", [1], [2]), link("one"))
    await store.close()
    with contextlib.closing(sqlite3.connect(store.database)) as connection:
        connection.executescript(
            """
            WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000)
            INSERT INTO rollouts (rollout_id, incarnation, state, version, opened_at)
            SELECT printf('rollout-%d', i), '', 'open', 0, 0 FROM n;
            INSERT INTO call_histories SELECT rollout_id, randomblob(16), 'x', '', '', 1 FROM rollouts
            WHERE rollout_id <> 'r';
            """.replace("'', '', 1", "x'', x'', 1")
        )
    chains = [link(f"n{number}").chain for number in range(39)] + [link("one").chain]
    async with TokenCaptureStore(store.database) as another:
        assert len(await another.find_calls("r", chains)) == 1
        times = []
        for _ in range(50):
            begun = time.perf_counter()
            await another.find_calls("r", chains)
            times.append(time.perf_counter() - begun)
    # With the visit to another thread; on a machine that does other things, the quickest tells.
    assert min(times) < 0.001
