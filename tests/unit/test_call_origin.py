"""Whose call it is: stored with entries, intents, flags and what is copied of them."""

from __future__ import annotations

import sqlite3
from dataclasses import astuple
from pathlib import Path

import pytest
from pydantic import ValidationError

from token_id_capture.errors import ConflictingEntryError
from token_id_capture.lifecycle import CallOrigin, Purpose
from token_id_capture.records import TokenEntry
from token_id_capture.sink import CaptureContext, register_call_intent, reset_token_sink, set_token_sink
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.maintain.verification import Checked, verify

ROLLOUT = "r1"
REVIEWER = CallOrigin("reviewer", "main", Purpose.TURN, True)
TITLE = CallOrigin("main", None, Purpose.AUXILIARY, False)


def entry(call: str, origin: CallOrigin, **more: object) -> TokenEntry:
    return TokenEntry.model_validate(
        {
            "rollout_id": ROLLOUT,
            "model_call_id": call,
            "prompt_token_ids": [1, 2],
            "generation_token_ids": [3],
            "generation_log_probs": [-0.5],
            "agent": origin.agent,
            "parent_agent": origin.parent_agent,
            "purpose": origin.purpose,
            "offers_tools": origin.offers_tools,
            **more,
        }
    )


def rows(path: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


async def test_an_entry_is_read_with_the_origin_that_it_was_stored_with(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(entry("known", REVIEWER))
        await store.put(entry("unknown", CallOrigin()))
        stored = {one.model_call_id: one.origin for one in (await store.freeze(ROLLOUT)).entries}
    assert stored == {"known": REVIEWER, "unknown": CallOrigin()}
    assert list(verify(store.database, Checked())) == []


async def test_a_lost_call_is_flagged_with_its_origin_also_in_the_snapshot(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.begin_attributed_call(ROLLOUT, "lost", REVIEWER)
        await store.begin_attributed_call(ROLLOUT, "broken", TITLE)
        await store.mark_incomplete(ROLLOUT, "broken", "lost_stream")
        detail = await store.describe_rollout(ROLLOUT)
        await store.freeze(ROLLOUT)
    assert [flag.origin for flag in detail.flags] == [TITLE]
    assert {intent.model_call_id: intent.origin for intent in detail.intents} == {"lost": REVIEWER, "broken": TITLE}
    columns = "model_call_id, agent, parent_agent, purpose, offers_tools, session_headers"
    assert set(rows(store.database, f"SELECT {columns} FROM snapshot_flags")) == {
        ("lost", *astuple(REVIEWER)),
        ("broken", *astuple(TITLE)),
    }


async def test_a_flag_on_a_stored_call_has_the_origin_of_its_entry(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(entry("call", REVIEWER))
        with pytest.raises(ConflictingEntryError):
            await store.put(entry("call", REVIEWER, model="another"))
        (flag,) = (await store.describe_rollout(ROLLOUT)).flags
    assert flag.origin == REVIEWER


async def test_the_same_tokens_of_another_agent_are_another_payload(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(entry("call", REVIEWER))
        with pytest.raises(ConflictingEntryError):
            await store.put(entry("call", TITLE))


async def test_a_changed_agent_is_found_as_damage(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(entry("call", REVIEWER))
    connection = sqlite3.connect(store.database)
    with connection:
        connection.execute("UPDATE entries SET agent = 'main'")
    connection.close()
    assert [damage.model_call_id for damage in verify(store.database, Checked())] == ["call"]


async def test_the_views_tell_whose_call_it_is(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path) as store:
        await store.put(entry("call", REVIEWER))
        await store.put(entry("main", CallOrigin()))
        await store.begin_attributed_call(ROLLOUT, "lost", TITLE)
    assert rows(store.database, "SELECT agents FROM rollout_overview") == [(2,)]
    assert rows(store.database, "SELECT agent, purpose FROM lost_calls") == [("main", "auxiliary")]
    assert rows(store.database, "SELECT agent FROM call_chain WHERE model_call_id = 'call'") == [("reviewer",)]


async def test_a_sink_that_knows_no_origins_still_gets_the_intent() -> None:
    class Plain:
        begun: list[str] = []  # noqa: RUF012

        async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
            self.begun.append(model_call_id)

        async def put(self, entry: TokenEntry) -> None: ...

        async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None: ...

        async def close(self) -> None: ...

    token = set_token_sink(CaptureContext(ROLLOUT, "call", Plain(), origin=REVIEWER))
    await register_call_intent()
    reset_token_sink(token)
    assert Plain.begun == ["call"]


@pytest.mark.parametrize("field", ["agent", "parent_agent"])
@pytest.mark.parametrize("name", ["", "x" * 201, 7])
def test_an_agent_is_a_short_text(field: str, name: object) -> None:
    with pytest.raises(ValidationError, match=field):
        entry("call", CallOrigin(), **{field: name})
