"""The disk says no, or does not answer truly: nothing is acknowledged that may be lost, and the store goes on."""

from __future__ import annotations

import errno
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from support import interposer
from support.children import Puppet, Start, until
from support.programs import entry
from token_id_capture.store import TokenCaptureStore


@pytest.fixture
def puppet(start: Start, control: interposer.Control, database: Path) -> Puppet:
    puppet = Puppet(start, database, control=control.path)
    assert puppet.do("put", "first", ["before"], 4) == [""]
    return puppet


async def _stored(database: Path) -> set[str]:
    async with TokenCaptureStore(database) as store:
        entries = await store.read_entries("first")
    for stored in entries:
        assert stored == entry("first", stored.model_call_id, len(stored.generation_token_ids))
    return {stored.model_call_id for stored in entries}


async def test_a_sync_that_fails_once_is_done_again_before_the_put_is_acknowledged(
    puppet: Puppet, control: interposer.Control, database: Path
) -> None:
    control.sync_failures = 1
    control.sync_error = errno.EIO
    syncs = control.log_syncs
    assert puppet.do("put", "first", ["during"], 4) == [""]
    assert control.injected == 1
    assert control.log_syncs > syncs
    puppet.kill()
    assert await _stored(database) == {"before", "during"}


async def test_syncs_that_go_on_failing_are_never_acknowledged_and_never_waited_for_in_vain(
    puppet: Puppet, control: interposer.Control, database: Path
) -> None:
    control.sync_failures = -1
    control.sync_error = errno.EIO
    errors = puppet.do("put", "first", [f"during{n}" for n in range(20)], 4, limit=20)
    assert all(error.startswith(("StoreError", "UnsettledError")) for error in errors), errors
    assert control.injected > 0
    control.sync_error = 0
    until(lambda: puppet.do("put", "first", ["after"], 4) == [""], "the store to go on")
    puppet.leave()
    assert await _stored(database) >= {"before", "after"}


@pytest.mark.parametrize("tokens", [4, 300_000], ids=["at the commit", "within the transaction"])
async def test_a_full_disk_refuses_puts_and_the_store_works_again_when_there_is_room(
    tokens: int, puppet: Puppet, control: interposer.Control, database: Path
) -> None:
    control.write_error = errno.ENOSPC
    errors = puppet.do("put", "first", [f"during{n}" for n in range(20)], tokens)
    assert all(error.startswith("StorageFullError") for error in errors), errors
    assert control.injected > 0
    control.write_error = 0
    assert puppet.do("put", "first", ["after"], 4) == [""]
    assert puppet.do("put", "first", ["during0"], tokens) == [""]
    puppet.leave()
    assert await _stored(database) == {"before", "after", "during0"}


async def test_a_checkpoint_that_fails_ends_neither_the_store_nor_what_it_holds(
    puppet: Puppet, control: interposer.Control, database: Path
) -> None:
    control.sync_failures = -1
    control.sync_error = errno.EIO
    # Nobody writes: this is the checkpoint of an idle store.
    until(lambda: control.injected > 0, "an idle checkpoint")
    control.sync_error = 0
    until(lambda: puppet.do("put", "first", ["after"], 4) == [""], "the store to go on")
    puppet.leave()
    assert await _stored(database) == {"before", "after"}


async def test_faults_that_come_and_go_under_load_lose_nothing_acknowledged(
    puppet: Puppet, control: interposer.Control, database: Path
) -> None:
    dice = random.Random(13)
    acknowledged, failed = {"before"}, 0
    for number in range(60):
        control.write_error = errno.ENOSPC if dice.random() < 0.2 else 0
        control.sync_failures = dice.choice((0, 0, 1, 2, 3, 8))
        control.sync_error = errno.EIO if control.sync_failures else 0
        calls = [f"{number}.{n}" for n in range(dice.randrange(1, 9))]
        errors = puppet.do("put", "first", calls, dice.choice((4, 4, 3000)))
        acknowledged.update(call for call, error in zip(calls, errors, strict=True) if not error)
        failed += sum(map(bool, errors))
    control.write_error = control.sync_error = 0
    until(lambda: puppet.do("put", "first", ["after"], 4) == [""], "the store to go on")
    puppet.leave()
    assert failed > 0
    assert len(acknowledged) > 100
    assert await _stored(database) >= acknowledged | {"after"}
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
