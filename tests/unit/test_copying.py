"""A copy of rollouts is exact, can be repeated, and changes nothing that is there."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.captured import entry, filled, finish, put_chain, sql
from support.many_rollouts import database_with
from support.whole_content import everything, whole_content
from token_id_capture.errors import StoreError, UnusableDatabaseError
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.copying import file_side
from token_id_capture.store.copying.databases import copy_database
from token_id_capture.store.copying.run import Copied, copy_rollouts
from token_id_capture.store.maintain.verification import Checked, verify


@pytest.fixture
def many(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 rollouts of every fate, and one long one."""
    return Path(shutil.copy(database_with(400, tmp_path_factory), tmp_path / "many.db"))


def test_there_and_back_every_row_is_the_same(many: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there.db", tmp_path / "back.db"
    filled(many, everything)
    first = copy_database(many, there, include_open=True)
    assert first.complete
    assert (first.copied, first.already_there) == (405, 0)
    assert copy_database(there, back, include_open=True) == first
    assert whole_content(back) == whole_content(there) == whole_content(many)
    assert list(verify(back, Checked())) == []
    assert sql(back, "SELECT count(*) FROM capture_file") == [(1,)]
    assert sql(back, "SELECT file_id FROM capture_file") != sql(many, "SELECT file_id FROM capture_file")


def test_repeated_it_copies_nothing_and_changes_nothing(many: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.db"
    copy_database(many, there, include_open=True)
    before = sql(there, "PRAGMA data_version"), whole_content(there)
    again = copy_database(many, there, include_open=True)
    assert again == Copied(already_there=401)
    assert (sql(there, "PRAGMA data_version"), whole_content(there)) == before


def test_open_rollouts_are_left_out_and_named(many: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.db"
    open_ones = [row[0] for row in sql(many, "SELECT rollout_id FROM rollouts WHERE state = 'open' ORDER BY 1")]
    copied = copy_database(many, there)
    assert copied.open_rollouts == open_ones != []
    assert not copied.complete
    assert copied.copied == 401 - len(open_ones)
    assert copy_database(many, there, include_open=True).copied == len(open_ones)
    assert whole_content(there) == whole_content(many)


def test_a_rollout_that_differs_is_a_conflict_and_stays_as_it_is(tmp_path: Path) -> None:
    there = tmp_path / "there.db"

    async def two_frozen(store: TokenCaptureStore) -> None:
        for rollout_id in ("math-0", "math-1"):
            await put_chain(store, rollout_id)
            await store.freeze(rollout_id)

    async def decide(store: TokenCaptureStore) -> None:
        await finish(store, "math-0", "masked", "multiple_roots")

    here = filled(tmp_path / "here.db", two_frozen)
    copy_database(here, there)
    before = whole_content(there)
    filled(here, decide)
    copied = copy_database(here, there)
    assert copied == Copied(already_there=1, conflicts=["math-0"])
    assert not copied.complete
    assert whole_content(there) == before


def test_any_difference_is_a_conflict(tmp_path: Path) -> None:
    here, there = filled(tmp_path / "here.db", everything), tmp_path / "there.db"
    copy_database(here, there, include_open=True)
    for change in (
        "UPDATE entries SET stored_at = stored_at + 1",
        "UPDATE incomplete_flags SET detail = 'changed'",
        "UPDATE call_intents SET outcome = NULL",
        "UPDATE call_histories SET ended = 0",
        "UPDATE rollouts SET version = version + 1",
        "DELETE FROM late_writes",
    ):
        changed = Path(shutil.copy(there, tmp_path / "changed.db"))
        sql(changed, change)
        assert copy_database(here, changed, include_open=True).conflicts, change


def test_only_those_that_are_asked_for_are_copied(many: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.db"
    copied = copy_database(many, there, ["zz-long", "rollout-0000015", "nobody", "zz-long"], include_open=True)
    assert (copied.copied, copied.absent) == (2, ["nobody"])
    assert sql(there, "SELECT rollout_id FROM rollouts ORDER BY 1") == [("rollout-0000015",), ("zz-long",)]


def test_what_is_damaged_is_left_out_and_named_and_its_neighbours_are_copied(many: Path, tmp_path: Path) -> None:
    wanted = [*(f"rollout-{number:07}" for number in range(20)), "zz-long"]
    sql(many, "DROP TRIGGER snapshot_entries_evidence")
    for number, damage in enumerate(
        (
            "UPDATE entries SET log_probs = zeroblob(length(log_probs)) WHERE rollout_id = 'zz-long'",
            "UPDATE entries SET prefix_call_id = 'nobody' WHERE rollout_id = 'zz-long' AND prefix_length > 0",
            "DELETE FROM snapshot_entries WHERE snapshot_id = "
            "(SELECT snapshot_id FROM rollouts WHERE rollout_id = 'zz-long')",
        )
    ):
        damaged, there = Path(shutil.copy(many, tmp_path / "damaged.db")), tmp_path / f"there-{number}.db"
        sql(damaged, damage)
        copied = copy_database(damaged, there, wanted, include_open=True)
        assert copied.copied == 20
        assert [found.rollout_id for found in copied.damaged] == ["zz-long"]
        assert sql(there, "SELECT count(*), sum(rollout_id = 'zz-long') FROM rollouts") == [(20, 0)]


def test_a_source_that_is_missing_makes_no_target(tmp_path: Path) -> None:
    with pytest.raises(UnusableDatabaseError, match="there is no capture database"):
        copy_database(tmp_path / "nowhere.db", tmp_path / "there.db")
    assert list(tmp_path.iterdir()) == []


def test_a_database_is_not_copied_to_itself(many: Path, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(many)
    for same in (many, tmp_path / "link.db", f"sqlite:///{many}"):
        with pytest.raises(StoreError, match="is the source itself"):
            copy_database(many, same)


def test_a_large_rollout_is_never_held_whole(tmp_path: Path) -> None:
    async def one_large(store: TokenCaptureStore) -> None:
        for call in range(24):
            await store.put(entry("math-0", f"c{call}", [call], [1], of_a_later_release="x" * 1_000_000))

    here, there = filled(tmp_path / "here.db", one_large), tmp_path / "there.db"
    tracemalloc.start()
    copied = copy_database(here, there, include_open=True)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (copied.copied, copied.calls) == (1, 24)
    assert most < 8_000_000
    assert whole_content(there) == whole_content(here)


def test_the_cost_of_a_rollout_does_not_grow_with_their_number(many: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.db"
    first = [f"rollout-{number:07}" for number in range(100)]
    copy_database(many, few, first, include_open=True)
    in_few, in_many = (steps_of_copying(source, tmp_path / f"of-{source.name}", first) for source in (few, many))
    assert in_many < 1.2 * in_few
    all_of_few, all_of_many = (steps_of_copying(source, tmp_path / f"all-{source.name}") for source in (few, many))
    assert all_of_many < 1.2 * 401 / 100 * all_of_few


def steps_of_copying(source: Path, target: Path, rollout_ids: Sequence[str] = ()) -> int:
    """How often SQLite has done ten instructions on the source."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    with contextlib.closing(sqlite3.connect(source, isolation_level=None)) as connection:
        connection.set_progress_handler(count, 10)
        with file_side.file_target(target) as written:
            copied = copy_rollouts(file_side.FileSource(source, connection), written, rollout_ids, include_open=True)
    assert copied.complete
    return steps
