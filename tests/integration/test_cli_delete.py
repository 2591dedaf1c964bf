"""``tokcap delete``: what goes, what stays, and who is asked first."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.captured import entry, filled, finish, one_line, put_chain, sql
from support.commands import RunTokcap
from token_id_capture import reasons
from token_id_capture.errors import RolloutRetiredError
from token_id_capture.store import TokenCaptureStore


async def three(store: TokenCaptureStore) -> None:
    await put_chain(store, "open")
    await put_chain(store, "masked")
    await finish(store, "masked", "masked", "multiple_roots")
    await put_chain(store, "kept")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return filled(tmp_path / "captures.db", three)


def rollouts(database: Path) -> list[tuple[str, str]]:
    return [(name, state) for name, state in sql(database, "SELECT rollout_id, state FROM rollouts ORDER BY 1")]


async def test_rollouts_of_any_state_go_and_their_ids_are_free_again(tokcap: RunTokcap, database: Path) -> None:
    done = tokcap("delete", "open", "masked", "open", "-d", database, "--yes")
    assert (done.returncode, done.stderr) == (0, "tokcap: deleted 2 rollouts\n")
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [["masked", "frozen"], ["open", "open"]]
    assert rollouts(database) == [("kept", "open")]
    released = sql(
        database, "SELECT outcome, reason FROM build_outcomes WHERE rollout_id = 'masked' ORDER BY outcome_id"
    )
    assert released[-1] == ("released", reasons.DELETED_BY_HAND)
    async with TokenCaptureStore(database, create=False) as store:
        await store.put(entry("masked", "anew", [1], [2]))
        assert [one.model_call_id for one in await store.read_entries("masked")] == ["anew"]


async def test_a_tombstone_keeps_late_writes_out(tokcap: RunTokcap, database: Path) -> None:
    done = tokcap("delete", "masked", "-d", database, "--yes", "--keep-tombstone")
    assert (done.returncode, done.stderr) == (0, "tokcap: retired 1 rollout\n")
    assert ("masked", "retired") in rollouts(database)
    async with TokenCaptureStore(database, create=False) as store:
        with pytest.raises(RolloutRetiredError):
            await store.put(entry("masked", "late", [1], [2]))


def test_without_somebody_to_ask_nothing_goes(tokcap: RunTokcap, database: Path) -> None:
    before = rollouts(database)
    refused = tokcap("delete", "open", "-d", database)
    assert refused.returncode == 2
    assert "use --yes" in one_line(refused.stderr)
    assert rollouts(database) == before


def test_an_unknown_id_is_named_and_the_others_go(tokcap: RunTokcap, database: Path) -> None:
    done = tokcap("delete", "nobody", "open", "-d", database, "--yes")
    assert done.returncode == 1
    assert f"no rollout 'nobody' is in {database}" in done.stderr
    assert rollouts(database) == [("kept", "open"), ("masked", "frozen")]
    again = tokcap("delete", "open", "-d", database)
    assert (again.returncode, again.stdout) == (1, "")


def test_a_malformed_id_stops_everything_before_it_begins(tokcap: RunTokcap, database: Path) -> None:
    before = rollouts(database)
    refused = tokcap("delete", "open", "../x", "-d", database, "--yes")
    assert (refused.returncode, rollouts(database)) == (2, before)
    assert "invalid rollout id" in one_line(refused.stderr)
