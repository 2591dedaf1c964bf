"""The output of ``tokcap finalize`` under what happens to files: a disk that fails, a loss of power, other programs.

Nothing is retired whose row is not on disk in the file of that name, and the same command always goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from support.commands import RunTokcap
from support.finalizing import Bench, as_line, feed_and_wait, record, running
from token_id_capture.finalize.row_file import RowFile
from token_id_capture.finalize.row_format import RowFormat
from token_id_capture.finalize.rows import read_row
from token_id_capture.outputs.whole_files import UnusableOutputError

PAGE = 4096


@pytest.fixture
def bench(tmp_path: Path, tokcap: RunTokcap) -> Bench:
    return Bench(tmp_path, tokcap)


def _remove(output: Path) -> None:
    output.unlink()


def _replace(output: Path) -> None:
    other = output.with_suffix(".new")
    other.write_bytes(output.read_bytes())
    other.replace(output)


def _rename(output: Path) -> None:
    output.rename(output.with_suffix(".old"))


def _empty(output: Path) -> None:
    os.truncate(output, 0)


def _shorten(output: Path) -> None:
    os.truncate(output, output.stat().st_size - 1)


@pytest.mark.parametrize("act", [_remove, _replace, _rename, _empty, _shorten])
def test_nothing_is_retired_whose_row_is_not_in_the_file_of_that_name(
    bench: Bench, act: Callable[[Path], None]
) -> None:
    bench.capture(range(6))
    with running(bench, "--retire") as process:
        feed_and_wait(bench, process, [0, 1])
        while bench.states()["1-0"][0] != "retired":
            assert process.poll() is None
        act(bench.output)
        assert process.stdin is not None
        process.stdin.write(b"".join(as_line(record(task)) for task in range(2, 6)))
        _, said = process.communicate(timeout=30)
    assert process.returncode == 2, said
    assert b"keep their captures: run the same command again" in said
    assert [bench.states()[f"{task}-0"][0] == "retired" for task in range(6)] == [True] * 2 + [False] * 4


def _zeros(rows: bytes, durable: int) -> bytes:
    return rows[:durable] + bytes(len(rows) - durable)


def _last_block(rows: bytes, durable: int) -> bytes:
    kept = max(durable, len(rows) // PAGE * PAGE)
    return rows[:kept] + bytes(len(rows) - kept)


def _first_page(rows: bytes, durable: int) -> bytes:
    page = (durable // PAGE + 1) * PAGE
    return rows[:durable] + bytes(page - durable) + rows[page:]


def _page_in_the_middle(rows: bytes, durable: int) -> bytes:
    page = (durable // PAGE + 1) * PAGE
    return rows[:page] + bytes(PAGE) + rows[page + PAGE :]


@pytest.mark.parametrize("damage", [_zeros, _last_block, _first_page, _page_in_the_middle])
def test_the_same_command_goes_on_after_a_loss_of_power(bench: Bench, damage: Callable[[bytes, int], bytes]) -> None:
    bench.capture(range(30))
    bench.write(*(record(task) for task in range(10)))
    assert bench.summary("--retire")["code"] == 0
    durable = bench.output.stat().st_size
    bench.write(*(record(task) for task in range(30)))
    assert bench.summary()["code"] == 0
    bench.output.write_bytes(damage(bench.output.read_bytes(), durable))
    assert bench.summary("--retire")["code"] == 0
    assert sorted(row["_ng_task_index"] for row in bench.rows()) == list(range(30))
    assert not any(row.get("mask_sample") for row in bench.rows())
    assert {state for state, _ in bench.states().values()} == {"retired"}


def test_damage_that_holds_a_retired_rollout_is_left_for_a_person(bench: Bench) -> None:
    bench.capture(range(3))
    bench.write(*(record(task) for task in range(3)))
    assert bench.summary("--retire")["code"] == 0
    rows = bench.output.read_bytes()
    damaged = bytes(100) + rows[100:]
    bench.output.write_bytes(damaged)
    refused = bench.finalize("--retire")
    assert refused.returncode == 2
    assert "is damaged from line 1 on" in refused.stderr
    assert bench.output.read_bytes() == damaged


@pytest.mark.parametrize("content", [b"\0\0\0\x18ftypmp42", b"{\0\x01\x02", b"SQLite format 3\0"])
def test_a_file_of_another_kind_is_not_taken_for_damage(bench: Bench, content: bytes) -> None:
    bench.capture([0])
    bench.write(record(0))
    bench.output.write_bytes(content)
    refused = bench.finalize()
    assert refused.returncode == 2
    assert "line 1 is not a row of this command" in refused.stderr
    assert bench.output.read_bytes() == content


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[], RowFile]:
    read = partial(read_row, row_format=RowFormat.TRAJECTORY, id_field=None)
    return lambda: RowFile(tmp_path / "rows", read)


def _row(rollout_id: str) -> bytes:
    row = {"rollout_id": rollout_id, "token_ids": [1], "loss_mask": [0], "snapshot_id": "s", "version": 1}
    return json.dumps(row).encode() + b"\n"


def _failing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)


def test_rows_of_a_failed_sync_are_taken_back(rows: Callable[[], RowFile], monkeypatch: pytest.MonkeyPatch) -> None:
    with rows() as file:
        file.append(_row("a"))
        file.sync()
        file.append(_row("b"))
        _failing_once(monkeypatch)
        with pytest.raises(UnusableOutputError, match="durable"):
            file.sync()
    assert list(rows().delivered) == ["a"]


def test_rows_that_nobody_knows_to_be_on_disk_are_written_again(
    rows: Callable[[], RowFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    with rows() as file:
        file.append(_row("a"))
        file.append(_row("b"))
    written: list[tuple[bytes, int]] = []
    pwrite = os.pwrite

    def watched(descriptor: int, data: bytes, position: int) -> int:
        written.append((data, position))
        return pwrite(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", watched)
    with rows() as file:
        file.write_again(file.end_of("a"))
        assert written == [(_row("b"), len(_row("a")))]
        assert file.path.read_bytes() == _row("a") + _row("b")
        file.append(_row("c"))
    assert list(rows().delivered) == ["a", "b", "c"]


def test_rows_are_for_their_owner_alone(bench: Bench) -> None:
    bench.capture([0])
    bench.write(record(0))
    before = os.umask(0o022)
    try:
        assert bench.summary()["code"] == 0
        for command in (["export"], ["report", "0-0"]):
            output = bench.directory / f"{command[0]}.jsonl"
            done = bench.tokcap(*command, "-d", bench.database, "-o", output)
            assert done.returncode == 0, done.stderr
            assert output.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    assert bench.output.stat().st_mode & 0o777 == 0o600
