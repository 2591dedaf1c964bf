"""Rollouts go from files to servers, between servers and back, exactly."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from support.captured import filled, put_chain, sql
from support.commands import RunTokcap
from support.many_rollouts import database_with
from support.postgres import PASSWORD, PostgresServer
from support.whole_content import everything, whole_content
from token_id_capture.errors import StoreError, UnusableDatabaseError
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.copying.databases import copy_database
from token_id_capture.store.copying.run import Copied

WANTED = [*(f"rollout-{number:07}" for number in range(100)), "zz-long"]


@pytest.fixture
def original(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """101 rollouts of every fate, and some with every field."""
    path = tmp_path / "original.db"
    copy_database(database_with(400, tmp_path_factory), path, WANTED, include_open=True)
    return filled(path, everything)


def test_from_a_file_over_two_servers_and_back_every_row_is_the_same(
    postgres: PostgresServer, postgres_url: str, original: Path, tmp_path: Path
) -> None:
    back = tmp_path / "back.db"
    with postgres.captures() as second_url:
        first = copy_database(original, postgres_url, include_open=True)
        assert first.complete
        assert first.copied == 105
        assert copy_database(postgres_url, second_url, include_open=True) == first
        assert copy_database(second_url, back, include_open=True) == first
        assert copy_database(original, second_url, include_open=True) == Copied(already_there=105)
    assert whole_content(back) == whole_content(original)


async def test_a_copied_rollout_goes_on_on_the_server(postgres_url: str, original: Path) -> None:
    copy_database(original, postgres_url, ["math-0", "math-1"], include_open=True)
    async with TokenCaptureStore(original) as file, TokenCaptureStore(postgres_url) as server:
        assert await server.freeze("math-1") == await file.freeze("math-1")
        assert await server.read_entries("math-0") == await file.read_entries("math-0")
        await put_chain(server, "math-0")
        assert (await server.describe_rollout("math-0")).summary.calls == 4


def test_text_that_the_server_cannot_hold_is_named_and_its_neighbours_are_copied(
    postgres_url: str, tmp_path: Path
) -> None:
    async def with_a_nul(store: TokenCaptureStore) -> None:
        for number in range(3):
            await put_chain(store, f"math-{number}")
        await store.mark_incomplete("math-1", "c0", "store_failed: \0")

    copied = copy_database(filled(tmp_path / "here.db", with_a_nul), postgres_url, include_open=True)
    assert copied.copied == 2
    (left_out,) = copied.damaged
    assert left_out.rollout_id == "math-1"
    assert "PostgreSQL cannot store it" in str(left_out)


def test_a_copy_whose_server_crashes_is_completed_by_the_same_copy(
    postgres: PostgresServer, postgres_url: str, original: Path, tmp_path: Path
) -> None:
    def crash(what: str, done: int, total: int | None) -> None:
        if done > 60:
            postgres.stop("immediate")

    try:
        with pytest.raises(StoreError, match="connection"):
            copy_database(original, postgres_url, include_open=True, progress=crash)
    finally:
        postgres.start()
    copied = copy_database(original, postgres_url, include_open=True)
    assert copied.complete
    assert copied.already_there == 64
    assert copied.copied == 41
    copy_database(postgres_url, tmp_path / "back.db", include_open=True)
    assert whole_content(tmp_path / "back.db") == whole_content(original)


def test_copies_at_the_same_time_copy_each_rollout_once(postgres_url: str, original: Path) -> None:
    reports: list[Copied] = []
    together = threading.Barrier(3)

    def copy() -> None:
        together.wait(60)
        reports.append(copy_database(original, postgres_url, include_open=True))

    threads = [threading.Thread(target=copy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.complete for report in reports] == [True] * 3
    assert sum(report.copied for report in reports) == 105
    assert {report.copied + report.already_there for report in reports} == {105}


def test_the_command_takes_urls_and_tells_no_password(
    tokcap: RunTokcap, postgres: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    async def one(store: TokenCaptureStore) -> None:
        await put_chain(store, "math-0")

    here = filled(tmp_path / "here.db", one)
    name = postgres_url.partition("?")[0].rpartition("/")[2]
    url = postgres.url(name, tcp=True)
    assert tokcap("copy", here, url, "--include-open", "--json").returncode == 0
    back = tokcap("copy", url, tmp_path / "back.db", "--include-open", "--json")
    assert json.loads(back.stdout)["copied"] == 1
    assert sql(tmp_path / "back.db", "SELECT count(*) FROM entries") == [(3,)]
    same = tokcap("copy", url, postgres_url)
    assert same.returncode == 2
    assert "is the source itself" in same.stderr
    wrong = tokcap("copy", url.replace(PASSWORD, "wrong-secret"), tmp_path / "other.db")
    assert wrong.returncode == 2
    assert "secret" not in same.stderr + wrong.stderr
    assert not (tmp_path / "other.db").exists()


def test_a_source_without_tables_stays_without(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.url(postgres.new_database())
    for _ in range(2):
        with pytest.raises(UnusableDatabaseError, match="there is no capture database"):
            copy_database(url, tmp_path / "there.db")
    assert not (tmp_path / "there.db").exists()
