"""How a prompt was made is told wherever calls are shown, and a rollout that fell apart what would have kept it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from support.call_trees import call
from support.commands import RunTokcap
from support.multi_turn import Echo, converse
from support.replay import running_gateway
from token_id_capture import reasons
from token_id_capture.builder.causes import Cause
from token_id_capture.explanation.continuity import continuity_notes
from token_id_capture.provenance import Continuity, Mode, Policy
from token_id_capture.testing.engine import PolicyEngine
from token_id_capture.testing.serving import serve_engine
from token_id_capture.testing.template import Habits


async def played(tmp_path: Path, continuity: str, habits: Habits) -> Path:
    """A database with one rollout of three turns."""
    database = tmp_path / "captures.db"
    async with (
        serve_engine(PolicyEngine(habits=habits)) as url,
        running_gateway(database, upstream=url, engine="vllm", continuity=continuity) as gateway,
    ):
        await converse(f"{gateway.base()}/v1", 1, Echo.WITHOUT_REASONING, turns=3)
        await gateway.store.freeze("r1")
    return database


async def test_every_command_tells_how_prompts_were_made(tmp_path: Path, tokcap: RunTokcap) -> None:
    database = await played(tmp_path, "exact", Habits(reasoning=True))

    async def told(*arguments: object) -> str:
        done = await asyncio.to_thread(tokcap, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = await told("show", "r1", "-d", database)
    assert "continuity" in shown
    assert shown.count("spliced") == 2
    assert [call["continuity"] for call in json.loads(await told("show", "r1", "-d", database, "--json"))["calls"]] == [
        "first",
        "spliced",
        "spliced",
    ]
    assert "With --continuity exact, of 3 calls 2 got the exact tokens" in " ".join(
        (await told("explain", "r1", "-d", database)).split()
    )
    await told("report", "r1", "-d", database, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count('"continuity":"spliced"') == 2
    await told("export", "-d", database, "-o", tmp_path / "rows.jsonl")
    [row] = map(json.loads, (tmp_path / "rows.jsonl").read_text("utf-8").splitlines())
    assert row["continuity"] == "exact"


async def test_a_rollout_that_fell_apart_is_told_that_continuity_would_have_kept_it(
    tmp_path: Path, tokcap: RunTokcap
) -> None:
    database = await played(tmp_path, "off", Habits(reasoning=True))
    done = await asyncio.to_thread(tokcap, "explain", "r1", "-d", database)
    assert "tokcap serve --continuity would have kept this rollout one sequence" in " ".join(done.stdout.split())


def test_where_the_history_may_have_been_edited_continuity_is_not_promised() -> None:
    (certain,) = continuity_notes([], {Cause.RETOKENIZATION})
    (perhaps,) = continuity_notes([], {Cause.RETOKENIZATION, Cause.EDITED_HISTORY})
    assert " if only " not in certain
    assert " if only " in perhaps
    assert not [*continuity_notes([], {Cause.COMPACTION, Cause.RETOKENIZATION}), *continuity_notes([], set())]


def test_reasons_for_the_template_are_counted_and_explained() -> None:
    made = [Continuity(Policy.EXACT, Mode.PLAIN, reason) for reason in ("first", "media", "media")]
    entries = [call(f"c{number}", [1], [2], continuity=one) for number, one in enumerate(made)]
    _, told = continuity_notes(entries, set())
    assert told == f"The template's prompt was sent for media (2): {reasons.CONTINUITY_REASONS['media']}"
