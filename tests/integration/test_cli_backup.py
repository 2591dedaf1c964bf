"""``tokcap backup``: one consistent state of a file that others write, or no file at all."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from support.captured import WAITS_FOR_EVER, content, entry, filled, finish, mode_of, one_line, process, put_chain, sql
from support.commands import RunInstalled, RunTokcap
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.maintain import backup
from token_id_capture.store.maintain.leftovers import held
from token_id_capture.store.maintain.verification import Checked

WRITES_ONE_AFTER_THE_OTHER = """
number = 0
while True:
    for call in ("a", "b"):
        await store.put(entry(f"math-{number:06}", call, list(range(500)), [number]))
    number += 1
    if number == 20:
        ready()
"""


async def some_rollouts(store: TokenCaptureStore) -> None:
    await put_chain(store, "math-0")
    await put_chain(store, "math-1")
    await finish(store, "math-1", "masked", "multiple_roots")


def test_a_copy_made_while_a_process_writes_is_one_state_of_the_file(tokcap: RunTokcap, tmp_path: Path) -> None:
    database, copies = tmp_path / "captures.db", [tmp_path / f"copy-{number}.db" for number in range(3)]
    with process(database, WRITES_ONE_AFTER_THE_OTHER) as writer:
        for copy in copies:
            made = tokcap("backup", copy, "-d", database)
            assert (made.returncode, made.stdout) == (0, ""), made.stderr
            assert one_line(made.stderr).endswith(": sound")
        assert writer.poll() is None
    for copy in copies:
        assert mode_of(copy) == 0o600
        calls = [row[0] for row in sql(copy, "SELECT rollout_id || call FROM (SELECT rollout_id, model_call_id AS call "
                                             "FROM entries ORDER BY rollout_id, model_call_id)")]  # fmt: skip
        # Nothing is missing before the last call that is there.
        assert calls == [f"math-{number // 2:06}{'ab'[number % 2]}" for number in range(len(calls))]
        assert len(calls) >= 40


def test_a_copy_is_a_database_to_go_on_with(tokcap: RunTokcap, tmp_path: Path) -> None:
    database, copy = filled(tmp_path / "captures.db", some_rollouts), tmp_path / "copies" / "copy.db"
    copy.parent.mkdir()
    assert tokcap("backup", copy, "-d", database).returncode == 0
    assert os.listdir(copy.parent) == ["copy.db"]
    settings = (
        "SELECT application_id, page_size, auto_vacuum FROM pragma_application_id, pragma_page_size, pragma_auto_vacuum"
    )
    assert sql(copy, settings) == sql(database, settings)

    async def go_on() -> None:
        async with TokenCaptureStore(database) as old, TokenCaptureStore(copy) as new:
            assert await new.read_entries("math-0") == await old.read_entries("math-0")
            await new.put(entry("math-0", "c3", [1], [2]))
            assert (await new.freeze("math-1")).entries == (await old.freeze("math-1")).entries

    asyncio.run(go_on())


def test_what_only_the_wal_holds_is_copied(tokcap: RunTokcap, tmp_path: Path) -> None:
    database, copy = tmp_path / "captures.db", tmp_path / "copy.db"
    with process(database, f"await put_chain(store, 'math-0')\nready()\n{WAITS_FOR_EVER}"):
        pass
    assert os.stat(f"{database}-wal").st_size > 0
    assert tokcap("backup", copy, "-d", database).returncode == 0
    assert sql(copy, "SELECT count(*) FROM entries") == [(3,)]


def test_free_pages_are_left_out(tokcap: RunTokcap, tmp_path: Path) -> None:
    async def mostly_retired(store: TokenCaptureStore) -> None:
        for number in range(10):
            await put_chain(store, f"math-{number}", width=5000)
        await store.delete([f"math-{number}" for number in range(9)])

    database, copy = filled(tmp_path / "captures.db", mostly_retired), tmp_path / "copy.db"
    assert tokcap("backup", copy, "-d", database).returncode == 0
    assert copy.stat().st_size < database.stat().st_size / 2
    assert sql(copy, "PRAGMA freelist_count") == [(0,)]


def test_nothing_is_ever_overwritten(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = filled(tmp_path / "captures.db", some_rollouts)
    there = tmp_path / "there.db"
    there.write_bytes(b"precious")
    (tmp_path / "directory").mkdir()
    (tmp_path / "dangling.db").symlink_to("nowhere")
    for name in ("there.db", "directory", "dangling.db", "captures.db"):
        refused = tokcap("backup", tmp_path / name, "-d", database)
        assert refused.returncode == 2
        assert "never overwrites: name a new file" in one_line(refused.stderr)
    assert there.read_bytes() == b"precious"
    assert tokcap("verify", "-d", database).returncode == 0


def test_a_destination_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    database, copy = filled(tmp_path / "captures.db", some_rollouts), tmp_path / "copy.db"

    def somebody_else_is_faster(what: str, done: int, total: int | None) -> None:
        copy.write_bytes(b"precious")

    with pytest.raises(RuntimeError, match="never overwrites"):
        backup.back_up(database, copy, Checked(), somebody_else_is_faster)
    assert copy.read_bytes() == b"precious"
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


@pytest.mark.parametrize("moment", ["copy", "structure", "calls"])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, moment: str) -> None:
    async def enough_to_be_interrupted(store: TokenCaptureStore) -> None:
        for number in range(30):
            await put_chain(store, f"math-{number}", width=2000)

    database = filled(tmp_path / "captures.db", enough_to_be_interrupted)
    (tmp_path / "copies").mkdir()

    def interrupt(what: str, done: int, total: int | None) -> None:
        if what == moment:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup.back_up(database, tmp_path / "copies" / "copy.db", Checked(), interrupt)
    assert os.listdir(tmp_path / "copies") == []


def test_a_damaged_call_is_copied_and_named(tokcap: RunTokcap, tmp_path: Path) -> None:
    database, copy = filled(tmp_path / "captures.db", some_rollouts), tmp_path / "copy.db"
    sql(database, "UPDATE entries SET finish_reason = 'length' WHERE rollout_id = 'math-0' AND model_call_id = 'c1'")
    made = tokcap("backup", copy, "-d", database)
    assert made.returncode == 1
    assert one_line(made.stdout).startswith("call c1 of rollout math-0: ")
    assert "1 damage; run tokcap verify on the original too" in one_line(made.stderr)
    assert sql(copy, "SELECT count(*) FROM entries") == [(6,)]


def test_a_source_or_a_place_that_cannot_be_used_is_one_line(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = filled(tmp_path / "captures.db", some_rollouts)
    for arguments in (
        ("backup", tmp_path / "copy.db", "-d", tmp_path / "missing.db"),
        ("backup", tmp_path / "no-directory" / "copy.db", "-d", database),
    ):
        refused = tokcap(*arguments)
        assert refused.returncode == 2
        one_line(refused.stderr)
    assert not (tmp_path / "copy.db").exists()


def test_a_full_disk_leaves_nothing_behind(run_installed: RunInstalled, tmp_path: Path) -> None:
    async def one_large_rollout(store: TokenCaptureStore) -> None:
        await put_chain(store, "math-0", width=100_000)

    database = filled(tmp_path / "captures.db", one_large_rollout)
    (tmp_path / "copies").mkdir()

    # The limit on the size of a file stands in for the end of a disk.
    def small_files_only() -> None:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    refused = run_installed(
        "backup", tmp_path / "copies" / "copy.db", "-d", database,
        preexec_fn=small_files_only, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert refused.returncode == 2
    one_line(refused.stderr.decode())
    assert os.listdir(tmp_path / "copies") == []


def test_the_original_is_not_changed(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = filled(tmp_path / "captures.db", some_rollouts)
    before = content(database)
    assert tokcap("backup", tmp_path / "copy.db", "-d", database).returncode == 0
    assert content(database) == before


async def one_open_and_one_frozen(store: TokenCaptureStore) -> None:
    await put_chain(store, "open")
    await put_chain(store, "frozen")
    await store.freeze("frozen")


def test_what_is_open_in_a_copy_is_incomplete_there_for_its_later_calls_are_not_in_it(
    tokcap: RunTokcap, tmp_path: Path
) -> None:
    database, copy = filled(tmp_path / "captures.db", one_open_and_one_frozen), tmp_path / "copy.db"
    assert tokcap("backup", copy, "-d", database).returncode == 0

    async def incomplete(path: Path) -> dict[str, bool]:
        async with TokenCaptureStore(path) as store:
            return {name: (await store.freeze(name)).incomplete for name in ("open", "frozen")}

    assert asyncio.run(incomplete(copy)) == {"open": True, "frozen": False}
    assert sql(copy, "SELECT rollout_id, reason FROM incomplete_flags") == [("open", "open_in_backup")]
    assert asyncio.run(incomplete(database)) == {"open": False, "frozen": False}


def test_a_last_copy_leaves_what_is_open_as_it_is_and_each_copy_is_a_file_of_its_own(
    tokcap: RunTokcap, tmp_path: Path
) -> None:
    database, copy = filled(tmp_path / "captures.db", one_open_and_one_frozen), tmp_path / "copy.db"
    assert tokcap("backup", copy, "-d", database, "--no-flag-open").returncode == 0
    assert sql(copy, "SELECT count(*) FROM incomplete_flags") == [(0,)]
    ((original,),) = sql(database, "SELECT file_id FROM capture_file")
    ((copied, copied_from),) = sql(copy, "SELECT file_id, copied_from FROM capture_file")
    assert copied != original
    assert copied_from == original


def test_what_a_killed_backup_left_behind_is_listed_and_removed_by_the_next(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = filled(tmp_path / "captures.db", some_rollouts)
    names = (".copy.db.00000000.partial", ".copy.db.11111111.partial", ".x.db")
    left, in_use, other = (tmp_path / name for name in names)
    for path in (left, in_use, other):
        path.write_text("part of a copy")
    with held(in_use):
        said = tokcap("doctor", "-d", database, "--json").stdout
        assert [Path(name).name for name in json.loads(said)["file"]["leftovers"]] == [left.name]
        assert tokcap("backup", tmp_path / "copy.db", "-d", database).returncode == 0
    assert [path.exists() for path in (left, in_use, other)] == [False, True, True]
