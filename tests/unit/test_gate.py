"""The writer lock: one holder at a time over all processes, free as soon as its holder is gone."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.lock import WriterLock


class Visitor(threading.Thread):
    """Wants the writer lock of a database once; a descriptor of its own makes it what another process would be."""

    def __init__(self, database: Path) -> None:
        super().__init__(daemon=True)
        self.arrived = threading.Event()
        self.left = threading.Event()
        self._writer_lock = WriterLock(database)

    def run(self) -> None:
        self.arrived.set()
        with self._writer_lock:
            pass
        self._writer_lock.close()
        self.left.set()


def test_the_second_waits_until_the_first_has_left(tmp_path: Path) -> None:
    writer_lock, visitor = WriterLock(tmp_path / "captures.db"), Visitor(tmp_path / "captures.db")
    with writer_lock:
        visitor.start()
        assert not visitor.left.wait(0.05)
    assert visitor.left.wait(10)
    writer_lock.close()


def test_an_error_inside_frees_the_gate(tmp_path: Path) -> None:
    writer_lock = WriterLock(tmp_path / "captures.db")
    with pytest.raises(ZeroDivisionError), writer_lock:
        raise ZeroDivisionError
    visitor = Visitor(tmp_path / "captures.db")
    visitor.start()
    assert visitor.left.wait(10)
    writer_lock.close()


def test_closing_twice_is_nothing_and_a_closed_writer_lock_can_be_used_again(tmp_path: Path) -> None:
    writer_lock = WriterLock(tmp_path / "captures.db")
    writer_lock.close()
    with writer_lock:
        pass
    writer_lock.close()
    writer_lock.close()
    with writer_lock:
        pass
    writer_lock.close()


def test_the_lock_file_is_beside_the_database_for_its_owner_only_and_not_inherited_by_programs(tmp_path: Path) -> None:
    writer_lock = WriterLock(tmp_path / "captures.db")
    with writer_lock:
        assert [path.name for path in tmp_path.iterdir()] == ["captures.db.lock"]
        status = os.stat(tmp_path / "captures.db.lock")
        assert stat.S_IMODE(status.st_mode) == 0o600
        descriptor = writer_lock._descriptor
        assert descriptor is not None
        assert not os.get_inheritable(descriptor)
    writer_lock.close()


async def test_a_store_that_is_never_done_lets_others_through(tmp_path: Path) -> None:
    done = 0

    async def flood(store: TokenCaptureStore, rollout_id: str) -> None:
        nonlocal done
        for number in range(6):
            await store.put(
                TokenEntry(
                    rollout_id=rollout_id,
                    model_call_id=str(number),
                    prompt_token_ids=[1],
                    generation_token_ids=[2],
                    generation_log_probs=[-0.5],
                )
            )
            done += 1

    waited: list[int] = []

    def visit() -> None:
        for _ in range(6):
            began = done
            visitor = Visitor(store.database)
            visitor.start()
            assert visitor.left.wait(10)
            waited.append(done - began)
            time.sleep(0.01)

    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        # More callers than a group takes, so that jobs always wait.
        await asyncio.gather(asyncio.to_thread(visit), *(flood(store, f"r{number}") for number in range(400)))
    assert sorted(waited)[-2] <= 3 * 128, waited
