"""The write-ahead log is emptied whenever nobody needs it, and somebody is told who keeps it from that."""

from __future__ import annotations

import asyncio
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from token_id_capture.records import TokenEntry
from token_id_capture.store import PinnedWalWarning, TokenCaptureStore
from token_id_capture.store.write import writer


def entry(model_call_id: str, tokens: int = 4) -> TokenEntry:
    return TokenEntry(
        rollout_id="first",
        model_call_id=model_call_id,
        prompt_token_ids=range(tokens),
        generation_token_ids=range(tokens),
        generation_log_probs=[-0.5] * tokens,
    )


@pytest.fixture
def quick_idling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "IDLE_SECONDS", 0.02)


@pytest.fixture
def low_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHECKPOINT_BYTES", 400_000)
    monkeypatch.setattr(writer, "TRUNCATE_BYTES", 1_600_000)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Callable[[], sqlite3.Connection]]:
    """Begin a read transaction; roll the connection back to end it."""
    connections = []

    def begin() -> sqlite3.Connection:
        connection = sqlite3.connect(tmp_path / "captures.db", isolation_level=None)
        connections.append(connection)
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM entries").fetchone()
        return connection

    yield begin
    for connection in connections:
        connection.close()


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints that were tried, by their mode."""
    tried: list[str] = []
    run = writer.Writer._run_checkpoint

    def counted(self: writer.Writer, mode: str) -> None:
        run(self, mode)
        tried.append(mode)

    monkeypatch.setattr(writer.Writer, "_run_checkpoint", counted)
    return tried


async def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.005)


def _log_size(tmp_path: Path) -> int:
    log = tmp_path / "captures.db-wal"
    return log.stat().st_size if log.exists() else 0


@pytest.mark.usefixtures("quick_idling")
async def test_an_idle_store_empties_the_log(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("a"))
        await _until(lambda: _log_size(tmp_path) == 0, "the log was not emptied")
        assert await store.read_entries("first") == (entry("a"),)


@pytest.mark.usefixtures("quick_idling")
async def test_an_idle_store_empties_the_log_once_a_reader_has_left_it(
    tmp_path: Path, reader: Callable[[], sqlite3.Connection], checkpoints: list[str]
) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("a"))
        pinning = reader()
        await store.put(entry("b"))
        tried = len(checkpoints)
        await _until(lambda: len(checkpoints) > tried + 1, "no checkpoint was tried")
        assert _log_size(tmp_path) > 0
        pinning.execute("ROLLBACK")
        await _until(lambda: _log_size(tmp_path) == 0, "nobody came back for the log")


@pytest.mark.usefixtures("low_thresholds")
async def test_a_log_that_grows_past_the_limit_is_cut_while_writing_goes_on(tmp_path: Path) -> None:
    largest = 0
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        for number in range(60):
            await store.put(entry(str(number), 5_000))
            largest = max(largest, _log_size(tmp_path))
    assert largest < 2_400_000


@pytest.mark.usefixtures("low_thresholds")
async def test_a_log_that_is_written_over_is_moved_once_for_each_time_that_it_fills(
    tmp_path: Path, checkpoints: list[str]
) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        for number in range(60):
            await store.put(entry(str(number), 5_000))
        written = 60 * 5_000 * 16
        assert 3 <= checkpoints.count("PASSIVE") <= 2 * written / 400_000


@pytest.mark.usefixtures("low_thresholds")
async def test_a_reader_that_pins_a_large_log_is_reported_once_and_by_name(
    tmp_path: Path, reader: Callable[[], sqlite3.Connection]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PinnedWalWarning)
        async with TokenCaptureStore(tmp_path / "captures.db") as store:
            await store.put(entry("a"))
            pinning = reader()
            for number in range(20):
                await store.put(entry(str(number), 5_000))
            pinning.execute("ROLLBACK")
    pinned = [str(warning.message) for warning in caught if warning.category is PinnedWalWarning]
    assert len(pinned) == 1
    assert "captures.db-wal" in pinned[0]
    assert "a reader pins the WAL" in pinned[0]


@pytest.mark.usefixtures("low_thresholds", "quick_idling")
async def test_a_reader_that_pinned_the_log_while_it_was_small_is_reported_when_it_has_grown(
    tmp_path: Path, reader: Callable[[], sqlite3.Connection], checkpoints: list[str]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PinnedWalWarning)
        async with TokenCaptureStore(tmp_path / "captures.db") as store:
            await store.put(entry("a"))
            reader()
            await store.put(entry("b"))
            # Idle checkpoints come back busy, and the log is too small to speak of.
            tried = len(checkpoints)
            await _until(lambda: len(checkpoints) > tried + 1, "no checkpoint was tried")
            assert not [warning for warning in caught if warning.category is PinnedWalWarning]
            for number in range(20):
                await store.put(entry(str(number), 5_000))
    assert [warning for warning in caught if warning.category is PinnedWalWarning]


async def test_closing_leaves_no_log_behind(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.put(entry("a"))
    assert _log_size(tmp_path) == 0
    with closing(sqlite3.connect(f"file:{tmp_path / 'captures.db'}?immutable=1", uri=True)) as connection:
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (1,)
