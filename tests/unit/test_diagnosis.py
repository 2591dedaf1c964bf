"""What the doctor says about facts that are hard to bring about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from token_id_capture.cli.output.diagnosis import Diagnosis, diagnose
from token_id_capture.store.maintain.health import FileHealth, Health, ProcessHealth, RolloutHealth
from token_id_capture.store.maintain.liveness import Liveness

HEALTHY = FileHealth(
    path="/captures.db",
    size=1_500_000_000,
    wal_size=0,
    free_size=0,
    mode="0600",
    file_system="ext4",
    journal_mode="wal",
    incremental_vacuum=True,
    schema_revision="0001",
    application_id=1,
    sqlite_version="3.51.3",
    wal_reset_bug=False,
    structure_damage=(),
)
NOW = 1_000_000.0


def diagnosed(*processes: ProcessHealth, **changes: Any) -> Diagnosis:
    return diagnose(Health(NOW, replace(HEALTHY, **changes), processes, (), RolloutHealth()))


def process(liveness: Liveness, last_seen_at: float = NOW) -> ProcessHealth:
    return ProcessHealth("w", 7, "host", liveness, 0.0, last_seen_at)


def test_nothing_is_said_about_a_healthy_file() -> None:
    assert diagnosed() == Diagnosis()


def test_many_free_pages_are_advice_and_few_are_not() -> None:
    assert diagnosed(free_size=1_200_000_000).notes == [
        "1.2 GB of 1.5 GB are free pages, which later captures use again: tokcap vacuum gives them back."
    ]
    assert "tokcap vacuum --full gives" in diagnosed(free_size=1_200_000_000, incremental_vacuum=False).notes[0]
    assert diagnosed(free_size=300_000_000) == diagnosed(size=200_000, free_size=190_000) == Diagnosis()


def test_a_large_wal_is_blamed_on_a_reader_only_while_somebody_writes() -> None:
    (pinned,) = diagnosed(process(Liveness.ALIVE), wal_size=300_000_000).findings
    assert pinned.startswith("the WAL has grown to 300.0 MB: a reader")
    (left_behind,) = diagnosed(process(Liveness.DEAD), wal_size=300_000_000).findings
    assert "no process was left to empty it" in left_behind


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "9p", "virtiofs"])
def test_a_file_system_that_loses_data_is_a_finding(kind: str) -> None:
    (finding,) = diagnosed(file_system=kind).findings
    assert kind in finding
    assert "local disk" in finding


def test_memory_and_an_old_sqlite_are_worth_a_note() -> None:
    notes = diagnosed(file_system="tmpfs", wal_reset_bug=True).notes
    assert ["tmpfs" in notes[0], "WAL-reset bug" in notes[1] and "newer SQLite" in notes[1]] == [True, True]


def test_another_journal_mode_is_a_finding() -> None:
    assert "journal mode delete" in diagnosed(journal_mode="delete").findings[0]


def test_a_process_that_cannot_be_seen_counts_as_writing_for_an_hour() -> None:
    def anybody(*processes: ProcessHealth) -> bool:
        return Health(NOW, HEALTHY, processes, (), RolloutHealth()).anybody_writes

    assert anybody(process(Liveness.UNKNOWN, NOW - 3_000))
    assert not anybody(process(Liveness.UNKNOWN, NOW - 4_000), process(Liveness.DEAD))
    assert not anybody()
