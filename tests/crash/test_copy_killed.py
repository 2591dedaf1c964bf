"""A copy is killed at one of its file operations after the other, and the same copy again completes it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support import interposer
from support.captured import filled, sql
from support.children import Start
from support.many_rollouts import database_with
from support.whole_content import whole_content
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.copying.databases import copy_database


async def _nothing(store: TokenCaptureStore) -> None:
    await store.open()


def test_a_copy_that_is_killed_at_any_point_is_completed_by_the_same_copy(
    start: Start, control: interposer.Control, database: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = database_with(400, tmp_path_factory)
    filled(database, _nothing)
    rollouts = [0]
    for step in (20, 330, 390, 450, 900, 1_000_000):
        control.reset()
        control.kill_at = step
        child = start("copy", source, database, control=control.path)
        code = child.wait()
        assert code == (0 if step == 1_000_000 else -signal.SIGKILL), child.text()
        rollouts += sql(database, "SELECT count(*) FROM rollouts")[0]
    # It was killed at the beginning, in between and near the end, and each went on where the one before had come to.
    assert rollouts == sorted(rollouts)
    assert len(set(rollouts)) > 3
    assert copy_database(source, database, include_open=True).already_there == 401
    copied, original = whole_content(database), whole_content(source)
    del copied["writers"], original["writers"]  # the target was made by a process of its own
    assert copied == original
