"""The disk fails once, the store goes on, and then the power fails: what was acknowledged is there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from support import interposer
from support.children import Start, until
from support.interposer import Operation, read_trace
from support.lost_states import lost_states
from support.power import PAGE, Disk
from support.programs import said

INSTANTS = 40

Run = Callable[..., list[Operation]]


@pytest.fixture
def run(start: Start, control: interposer.Control, database: Path, tmp_path: Path) -> Run:
    """Live through outages, alone or beside another process; the trace of all that happened."""

    def live(second: str, *, processes: int = 1, trusting: bool = False) -> list[Operation]:
        trace = tmp_path / "trace"
        if processes > 1:
            start("keep_open", database, tmp_path / "other.acknowledged", control=control.path, trace=trace)
            until(lambda: said(tmp_path / "other.acknowledged"), "the other process to open the database")
        arguments = (database, tmp_path / "life.acknowledged", control.path, second, trusting, 3)
        start("life_with_outages", *arguments, control=control.path, trace=trace).succeed()
        assert control.injected > 0
        return list(read_trace(trace))

    return live


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("second", ["database_write_faults", "database_sync_faults"])
def test_what_was_acknowledged_after_an_outage_survives_a_loss_of_power(
    second: str, processes: int, run: Run, tmp_path: Path
) -> None:
    operations = run(second, processes=processes)
    lines = [operation.data.decode() for operation in operations if operation.kind == "acknowledge"]
    assert sum(line.startswith("put ") for line in lines) > 20
    assert lost_states(operations, tmp_path, instants=INSTANTS) == []


def test_a_store_that_trusts_its_log_after_an_error_would_be_found_out(run: Run, tmp_path: Path) -> None:
    assert lost_states(run("database_write_faults", trusting=True), tmp_path, instants=INSTANTS) != []


def test_the_model_of_the_disk_writes_no_page_that_a_failed_sync_left_clean(tmp_path: Path) -> None:
    disk, dice = Disk(), random.Random(1)
    for operation in (
        Operation("write", "a.db", 0, b"old" * 10),
        Operation("sync", "a.db", 0, b""),
        Operation("sync", "", 0, b""),
        Operation("write", "a.db", 0, b"new"),
        Operation("failed sync", "a.db", 0, b""),
        Operation("write", "a.db", PAGE, b"next"),
        Operation("sync", "a.db", 0, b""),
    ):
        disk.apply(operation)
    disk.lose_power(tmp_path, 1.0, dice)
    assert (tmp_path / "a.db").read_bytes() == b"old" * 10 + bytes(PAGE - 30) + b"next"
    # Written to again, the page is written whole, with what the failed sync had left behind.
    for operation in (Operation("write", "a.db", 6, b"later"), Operation("sync", "a.db", 0, b"")):
        disk.apply(operation)
    disk.lose_power(tmp_path, 0.0, dice)
    assert (tmp_path / "a.db").read_bytes()[:30] == b"newoldlater" + (b"old" * 10)[11:]
