"""The disk says no, or does not answer truly: nothing is acknowledged that may be lost, and the store goes on."""

from __future__ import annotations

import errno
from pathlib import Path

import interposer
import pytest
from children import Puppet, Start, until
from programs import entry

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
    assert all(error.startswith("StoreError") for error in errors), errors
    assert control.injected > 0
    until(lambda: puppet.open_files(database.name) == 0, "the failed writer to close the database")
    control.sync_error = 0
    assert puppet.do("put", "first", ["after"], 4) == [""]
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
