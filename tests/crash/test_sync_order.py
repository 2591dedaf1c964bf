"""The log is on the disk before a put is acknowledged: seen from between SQLite and the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import interposer
from support.children import Start
from support.interposer import Operation, read_trace


@pytest.fixture
def operations(start: Start, control: interposer.Control, database: Path, tmp_path: Path) -> list[Operation]:
    trace = tmp_path / "trace"
    start("sync_each", database, tmp_path / "life.acknowledged", control=control.path, trace=trace).succeed()
    return list(read_trace(trace))


def _line(operation: Operation) -> str:
    return operation.data.decode().strip() if operation.kind == "acknowledge" else ""


def _between(operations: list[Operation], first: str, last: str) -> list[Operation]:
    lines = [_line(operation) for operation in operations]
    return operations[lines.index(first) : lines.index(last)]


def _of_log(operations: list[Operation], kind: str) -> list[int]:
    return [
        number
        for number, operation in enumerate(operations)
        if operation.kind == kind and operation.name.endswith("-wal")
    ]


def test_the_log_is_synced_after_its_last_write_and_before_the_answer(operations: list[Operation]) -> None:
    for number in range(20):
        during = _between(operations, f"hand {number}", f"put {number}")
        writes, syncs = _of_log(during, "write"), _of_log(during, "sync")
        assert writes
        assert syncs
        assert syncs[-1] > writes[-1]


def test_calls_that_share_a_commit_share_its_one_sync(operations: list[Operation]) -> None:
    during = _between(operations, "together", "done")
    (sync,) = _of_log(during, "sync")
    assert sync > _of_log(during, "write")[-1]
    answers = [number for number, operation in enumerate(during) if _line(operation).startswith("put group")]
    assert len(answers) == 64
    assert min(answers) > sync


def test_the_names_of_the_files_are_on_the_disk_before_the_first_answer(operations: list[Operation]) -> None:
    before = operations[: [_line(operation) for operation in operations].index("put 0")]
    first_log_write = _of_log(before, "write")[0]
    assert any(operation.kind == "sync" and not operation.name for operation in before[first_log_write:])
