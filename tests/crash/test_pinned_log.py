"""Eight writers, more log than is kept, and a reader who does not let go."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from support.children import Start, until
from support.programs import entry, said
from token_id_capture.store import TokenCaptureStore

WRITERS = 8
CALLS = 140
TOKENS = 4096  # 16 KiB prompt, 16 KiB generation, 32 KiB log probabilities


async def test_a_reader_that_holds_a_transaction_stops_no_writer_and_is_named(
    start: Start, database: Path, tmp_path: Path
) -> None:
    ledgers = [tmp_path / f"{number}.acknowledged" for number in range(WRITERS)]
    start("create", database, tmp_path / "created").succeed()
    log = database.with_name("captures.db-wal")
    with closing(sqlite3.connect(database, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM entries").fetchone() == (0,)
        writers = [
            start("put_many", database, ledger, f"rollout{number}", CALLS, TOKENS, 50)
            for number, ledger in enumerate(ledgers)
        ]
        until(lambda: all("done" in said(ledger) for ledger in ledgers), "all puts")
        assert reader.execute("SELECT count(*) FROM entries").fetchone() == (0,)
        assert os.stat(log).st_size > WRITERS * CALLS * 64 * 1024
        reader.execute("ROLLBACK")
    for writer in writers:
        writer.succeed()
    assert not log.exists() or os.stat(log).st_size == 0
    warnings = [line for ledger in ledgers for line in said(ledger) if line.startswith("PinnedWalWarning")]
    assert warnings
    assert all(str(log) in warning and "a reader pins the WAL" in warning for warning in warnings)
    assert len(warnings) <= WRITERS
    async with TokenCaptureStore(database) as store:
        for number in range(WRITERS):
            stored = await store.read_entries(f"rollout{number}")
            assert len(stored) == CALLS
            for call in stored:
                assert call == entry(f"rollout{number}", call.model_call_id, TOKENS)
