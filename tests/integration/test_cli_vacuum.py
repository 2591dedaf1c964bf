"""``tokcap vacuum``: the file shrinks, its content stays, and writers go on."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from support.captured import filled, one_line, process, put_chain, sql
from support.commands import RunTokcap
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore


async def mostly_retired(store: TokenCaptureStore) -> None:
    for number in range(40):
        await put_chain(store, f"math-{number}", width=10_000)
    await store.retire([f"math-{number}" for number in range(40) if number % 10])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return filled(tmp_path_factory.mktemp("original") / "captures.db", mostly_retired).read_bytes()


@pytest.fixture
def database(original: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "captures.db"
    path.write_bytes(original)
    return path


def entries(database: Path) -> list[tuple[TokenEntry, ...]]:
    async def read() -> list[tuple[TokenEntry, ...]]:
        async with TokenCaptureStore(database) as store:
            return [await store.read_entries(f"math-{number}") for number in range(0, 40, 10)]

    return asyncio.run(read())


@pytest.mark.parametrize("full", [[], ["--full"]])
def test_free_pages_go_back_and_the_content_stays(tokcap: RunTokcap, database: Path, full: list[str]) -> None:
    before, size = entries(database), database.stat().st_size
    done = tokcap("vacuum", "-d", database, *full)
    assert (done.returncode, done.stdout) == (0, "")
    assert database.stat().st_size < size / 5
    assert sql(database, "PRAGMA freelist_count", "PRAGMA auto_vacuum") == [(2,)]
    assert entries(database) == before
    assert tokcap("verify", "-d", database).returncode == 0
    said = done.stderr.splitlines()
    assert said[-1].startswith("tokcap: gave back 1")
    assert said[-1].endswith(f"and has {database.stat().st_size / 1e6:.1f} MB")
    assert said[:-1] == (["tokcap: warning: writers wait until the whole file is rewritten"] if full else [])


def test_a_file_without_free_pages_stays_as_it_is(tokcap: RunTokcap, database: Path) -> None:
    assert tokcap("vacuum", "-d", database).returncode == 0
    size = database.stat().st_size
    assert "gave back 0 bytes" in one_line(tokcap("vacuum", "-d", database).stderr)
    assert database.stat().st_size == size


def test_a_process_goes_on_writing_meanwhile(tokcap: RunTokcap, database: Path) -> None:
    size = database.stat().st_size
    writes = "for n in range(10**6):\n    await store.put(entry('running', f'c{n}', [n], [n]))\n    n or ready()"
    with process(database, writes) as writer:
        stored = sql(database, "SELECT count(*) FROM entries")[0][0]
        done = tokcap("vacuum", "-d", database)
        assert done.returncode == 0, done.stderr
        assert sql(database, "SELECT count(*) FROM entries")[0][0] > stored
        assert writer.poll() is None
    assert database.stat().st_size < size / 2
    assert tokcap("verify", "-d", database).returncode == 0


def test_a_reader_that_keeps_a_transaction_open_delays_the_shrinking_and_is_named_as_the_cause(
    tokcap: RunTokcap, database: Path
) -> None:
    size = database.stat().st_size
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM entries").fetchone()
        gave, waits = tokcap("vacuum", "-d", database).stderr.splitlines()
        assert "gave back 0 bytes" in gave
        assert "a reader ends its open transaction" in waits
    assert tokcap("vacuum", "-d", database).returncode == 0
    assert database.stat().st_size < size / 5


def test_a_file_made_without_incremental_vacuum_needs_a_full_one(tokcap: RunTokcap, database: Path) -> None:
    sql(database, "PRAGMA journal_mode = DELETE", "PRAGMA auto_vacuum = NONE", "VACUUM", "PRAGMA journal_mode = WAL")
    sql(database, "CREATE TABLE filler AS SELECT zeroblob(4000000)", "DROP TABLE filler")
    assert "tokcap vacuum --full" in tokcap("vacuum", "-d", database).stderr.splitlines()[-1]
    assert tokcap("vacuum", "-d", database, "--full").returncode == 0
    assert sql(database, "PRAGMA auto_vacuum") == [(2,)]


def test_a_database_that_is_missing_is_not_made(tokcap: RunTokcap, tmp_path: Path) -> None:
    for full in ([], ["--full"]):
        refused = tokcap("vacuum", "-d", tmp_path / "missing.db", *full)
        assert refused.returncode == 2
        assert "no capture database" in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "missing.db").exists()
