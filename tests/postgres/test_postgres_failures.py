"""Processes, connections and the server end at any moment: what was acknowledged stays, and nothing is done twice."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from support.captured import entry
from support.cutting_proxy import Cut, cutting_proxy
from support.postgres import PostgresServer
from token_id_capture.errors import RolloutFrozenError, RolloutRetiredError, StoreError, UnusableDatabaseError
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.postgres import writer as postgres_writer

PROGRAM = """
import asyncio, sys
sys.path.insert(0, sys.argv[3])
from support.captured import entry
from token_id_capture.store import TokenCaptureStore
async def main():
    async with TokenCaptureStore(sys.argv[1]) as store:
        async def one(number):
            while True:
                call = f"{sys.argv[2]}-{number}"
                await store.begin_call("shared", call)
                await store.put(entry("shared", call, [number], [number, 7]))
                print(call, flush=True)
                number += 16
        await asyncio.gather(*(one(number) for number in range(16)))
asyncio.run(main())
"""


def named(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


def through(postgres: PostgresServer, url: str, port: int) -> str:
    return postgres.url(named(url), tcp=True).replace(f":{postgres.port}/", f":{port}/")


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Do this in a thread, and wait for its end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(60)


def test_what_a_killed_process_was_told_is_there_and_its_locks_are_not(
    postgres: PostgresServer, postgres_url: str
) -> None:
    dice, acknowledged = random.Random(5), set[str]()
    for number in range(4):
        arguments = [sys.executable, "-c", PROGRAM, postgres_url, f"p{number}", str(Path(__file__).parents[1])]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            acknowledged |= {child.stdout.readline().strip() for _ in range(dice.randrange(20, 60))}
            child.kill()
            acknowledged |= {line.strip() for line in child.stdout if line.endswith("\n")}

    async def look() -> None:
        async with TokenCaptureStore(postgres_url) as store:
            await asyncio.wait_for(store.put(entry("shared", "after", [1], [2])), 20)
            snapshot = await store.freeze("shared")
            assert acknowledged <= {one.model_call_id for one in snapshot.entries}
            detail = await store.describe_rollout("shared")
            assert {one.model_call_id for one in snapshot.entries}.isdisjoint(
                intent.model_call_id for intent in detail.intents
            )

    asyncio.run(look())


@pytest.mark.parametrize("cut", Cut)
def test_a_connection_lost_in_a_commit_is_settled_by_a_look(
    postgres: PostgresServer, postgres_url: str, cut: Cut
) -> None:
    async def run(port: int) -> None:
        async with TokenCaptureStore(through(postgres, postgres_url, port)) as store:
            await store.put(entry("r", "c", [1], [2]))
            proxy.cut = cut
            # A flag that was set twice would be two.
            await store.mark_incomplete("r", "c", "capture_failed")
            assert proxy.cuts == 1
            assert len((await store.describe_rollout("r")).flags) == 1
            proxy.cut = cut
            snapshot = await store.freeze("r")
            assert (len(snapshot.entries), snapshot.version) == (1, 2)
            proxy.cut = cut
            assert await store.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
            assert proxy.cuts == 3

    with cutting_proxy(f"{postgres.home}/.s.PGSQL.{postgres.port}", b"\0COMMIT\0") as proxy:
        asyncio.run(run(proxy.port))


def test_sessions_that_are_ended_lose_nothing_and_repeat_nothing(postgres: PostgresServer, postgres_url: str) -> None:
    ended = threading.Event()

    def end_sessions() -> None:
        with postgres.admin() as admin:
            for _ in range(12):
                if ended.wait(0.15):
                    break
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = %s AND application_name = 'tokcap' ORDER BY random() LIMIT 1",
                    [named(postgres_url)],
                )

    async def run() -> None:
        async with TokenCaptureStore(postgres_url) as store:
            for turn in range(12):
                await asyncio.gather(
                    *(store.put(entry(f"r{n}", f"c{turn}", [turn, n], [n])) for n in range(10)),
                    *(store.mark_incomplete(f"r{n}", f"c{turn}", "capture_failed") for n in range(10)),
                )
            ended.set()
            for n in range(10):
                detail = await store.describe_rollout(f"r{n}")
                assert (len(detail.calls), len(detail.flags)) == (12, 12)

    with beside(end_sessions):
        asyncio.run(run())


def test_writers_outlive_a_server_that_stops_at_once_and_starts_again(
    postgres: PostgresServer, postgres_url: str
) -> None:
    restarted, done = threading.Event(), list[int]()

    async def run() -> None:
        async with TokenCaptureStore(postgres_url) as one, TokenCaptureStore(postgres_url) as two:
            turn = 0
            while not restarted.is_set():
                puts = [
                    store.put(entry(f"r{n}", f"{at}-{turn}", [turn, n], [n]))
                    for at, store in enumerate((one, two))
                    for n in range(4)
                ]
                marks = [one.mark_incomplete(f"r{n}", f"{turn}", "capture_failed") for n in range(2)]
                await asyncio.gather(*puts, *marks)
                turn += 1
            for n in range(4):
                detail = await two.describe_rollout(f"r{n}")
                assert len(detail.calls) == 2 * turn
                assert len(detail.flags) == (turn if n < 2 else 0)
            done.append(turn)

    with beside(lambda: asyncio.run(run())):
        for _ in range(2):
            time.sleep(0.3)
            postgres.stop("immediate")
            postgres.start()
        restarted.set()
    assert done


def test_no_mix_of_work_waits_for_itself(postgres: PostgresServer, postgres_url: str) -> None:
    rollouts = [f"r{number}" for number in range(6)]
    refused = (RolloutFrozenError, RolloutRetiredError)

    async def work(store: TokenCaptureStore, seed: int) -> None:
        dice = random.Random(seed)
        for turn in range(25):
            some = dice.sample(rollouts, 4)
            jobs = [store.put(entry(one, f"{seed}-{turn}", [turn], [seed])) for one in some]
            jobs += [store.mark_incomplete(one, "", "capture_failed") for one in reversed(some[:2])]
            jobs.append(_freeze_and_drop(store, dice.choice(rollouts), dice))
            others = [store.delete(some[:1] if turn % 5 == 0 else []), store.sweep_retired(0.5)]
            results = await asyncio.gather(*jobs, *others, return_exceptions=True)
            unexpected = [one for one in results if isinstance(one, Exception) and not isinstance(one, refused)]
            assert not unexpected

    async def run() -> None:
        stores = [TokenCaptureStore(postgres_url) for _ in range(3)]
        try:
            await asyncio.gather(*(work(store, seed) for seed, store in enumerate(stores)))
        finally:
            for store in stores:
                await store.close()

    asyncio.run(run())
    with postgres.admin(named(postgres_url)) as admin:
        deadlocks = admin.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
        assert deadlocks == (0,)


async def _freeze_and_drop(store: TokenCaptureStore, rollout_id: str, dice: random.Random) -> None:
    snapshot = await store.freeze(rollout_id)
    if snapshot.snapshot_id:
        outcome = dice.choice(["delivered", "masked"])
        with suppress(LookupError):  # another one retired it meanwhile
            await store.record_outcome(snapshot.snapshot_id, snapshot.version, outcome)
        await store.drop(rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version)


def test_a_server_that_stays_away_is_an_error_that_says_what_is_known(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_writer, "PATIENCE_SECONDS", 0.5)

    async def run(port: int) -> None:
        async with TokenCaptureStore(through(postgres, postgres_url, port)) as store:
            await store.put(entry("r", "c", [1], [2]))
            proxy.cut = Cut.AFTER
            proxy.stop_listening()
            with pytest.raises(StoreError, match="whether this was stored is not known") as caught:
                await store.put(entry("r", "d", [1], [2]))
            assert "a-secret" not in str(caught.value)
            with pytest.raises(StoreError, match="nothing was stored"):
                await store.put(entry("r", "e", [1], [2]))

    with cutting_proxy(f"{postgres.home}/.s.PGSQL.{postgres.port}", b"\0COMMIT\0") as proxy:
        asyncio.run(run(proxy.port))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("synchronous_commit = off", "synchronous_commit is off there"),
        ("default_transaction_isolation = serializable", ""),
    ],
)
def test_a_database_that_would_lose_what_it_acknowledges_is_refused(
    postgres: PostgresServer, postgres_url: str, setting: str, reason: str
) -> None:
    async def run() -> None:
        async with TokenCaptureStore(postgres_url) as store:
            await store.put(entry("r", "c", [1], [2]))

    with postgres.admin() as admin:
        admin.execute(f"ALTER DATABASE {named(postgres_url)} SET {setting}".encode())
        try:
            if reason:
                with pytest.raises(UnusableDatabaseError, match=reason):
                    asyncio.run(run())
            else:
                asyncio.run(run())
        finally:
            admin.execute(f"ALTER DATABASE {named(postgres_url)} RESET ALL".encode())


def test_a_database_in_the_place_of_another_is_refused(postgres: PostgresServer, postgres_url: str) -> None:
    async def run() -> None:
        async with TokenCaptureStore(postgres_url) as store:
            await store.put(entry("r", "c", [1], [2]))
            known = store.file_id
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute("UPDATE capture_file SET file_id = md5(file_id)")
        store = TokenCaptureStore(postgres_url, file_id=known)
        with pytest.raises(UnusableDatabaseError, match="was replaced while it was in use"):
            await store.put(entry("r", "d", [1], [2]))
        await store.close()

    asyncio.run(run())


def test_a_forked_child_opens_for_itself(postgres_url: str) -> None:
    store = TokenCaptureStore(postgres_url)
    asyncio.run(store.put(entry("r", "parent", [1], [2])))
    child = os.fork()
    if not child:
        try:
            asyncio.run(store.put(entry("r", "child", [1], [2])))
            assert len(asyncio.run(store.read_entries("r"))) == 2
            asyncio.run(store.close())
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    asyncio.run(store.put(entry("r", "after", [1], [2])))
    assert len(asyncio.run(store.read_entries("r"))) == 3
    asyncio.run(store.close())
