"""What OpenCode really does, replayed: what is stored, refused, left open or marked, call by call."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from support.harness import FOLDER, Exchange, ScenarioEngine, exchanges, with_token_ids
from support.made_up import answering, pausing
from support.replay import Gateway, running_gateway, until
from token_id_capture.builder import run_builder

STORED, REFUSED, LOST, UNKNOWN = "stored", "refused", "lost_stream", "unknown_outcome"
GOOD = [STORED, STORED, STORED, STORED]

# What becomes of each call where the engine sends ids.
OUTCOMES = {
    "main-chat": GOOD,
    "resume": [*GOOD, STORED],
    "sub-agent": [*GOOD, STORED],
    "ended-without-done": GOOD,
    "http-400": [STORED, REFUSED],
    "http-401": [STORED, REFUSED],
    "http-429-always": [STORED, *[REFUSED] * 6],
    "http-429-once": [STORED, REFUSED, *[STORED] * 3],
    "http-500-always": [STORED, *[UNKNOWN] * 6],
    "http-500-once": [STORED, UNKNOWN, *[STORED] * 3],
    "title-500": [UNKNOWN, *GOOD],
    "reset": [STORED, UNKNOWN, *[STORED] * 3],
    "cut-always": [STORED, *[LOST] * 6],
    "cut-early": [STORED, STORED, LOST, STORED, STORED],
    "cut-mid": [STORED, STORED, LOST, STORED, STORED],
    "ended-mid": [STORED, STORED, LOST, STORED],
    "killed-mid-stream": [STORED, LOST],
}
# Of the stub's own responses, that have no ids; main-chat's carry three made-up ones for 42 tokens.
PLAIN = {STORED: "no_token_ids"}


async def played(gateway: Gateway, calls: list[Exchange]) -> list[str]:
    """Make the calls of a scenario as the harness made them; what became of each."""
    engine = ScenarioEngine(calls)
    gateway.engine.handler = engine
    outcomes = []
    for number, call in enumerate(calls):
        rollout = f"call-{number}"
        if call.fault == "stall":
            await _hangs_up(gateway, call, rollout, engine)
        else:
            response = await gateway.post(call.path, call.body, rollout, **call.headers)
            assert response.status == (call.status or 502)
            # Where the engine's response ends properly but early, the client's must not look whole.
            assert response.whole == (call.fault not in ("cut", "cutclean"))
        outcomes.append(await outcome(gateway, rollout))
    return outcomes


async def _hangs_up(gateway: Gateway, call: Exchange, rollout: str, engine: ScenarioEngine) -> None:
    """Read as far as the harness read, and be killed."""
    async with gateway.session.post(
        gateway.base(rollout) + call.path, data=call.body, headers=call.headers
    ) as response:
        for _ in range(7):
            await response.content.readuntil(b"\n\n")
        response.close()

    async def marked() -> bool:
        return bool(await gateway.flags(rollout))

    await until(marked)
    engine.stalls_until.set()


async def outcome(gateway: Gateway, rollout: str) -> str:
    detail = await gateway.store.describe_rollout(rollout)
    flags = [flag.reason for flag in detail.flags]
    if detail.calls:
        assert (detail.intents, flags) == ((), []), "stored, so neither open nor marked"
        return STORED
    (intent,) = detail.intents
    if flags:
        assert intent.outcome is None, "marked, so it stays open"
        return flags[0]
    assert intent.outcome == "refused"
    return REFUSED


def test_every_scenario_is_expected_to_end_somehow() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(OUTCOMES)


@pytest.mark.parametrize("scenario", list(OUTCOMES))
async def test_with_an_engine_that_sends_ids_each_call_is_stored_or_known_to_be_lost(
    tmp_path: Path, scenario: str
) -> None:
    calls = [with_token_ids(call) for call in exchanges(scenario)]
    async with running_gateway(tmp_path, engine="vllm", drain_seconds=0.2) as gateway:
        outcomes = await played(gateway, calls)
        assert outcomes == OUTCOMES[scenario]
        for number, (call, became) in enumerate(zip(calls, outcomes, strict=True)):
            snapshot = await gateway.store.freeze(f"call-{number}")
            assert snapshot.incomplete == (became in (LOST, UNKNOWN))
            for entry in snapshot.entries:
                assert len(entry.generation_token_ids) == 42
                assert entry.model_extra is not None
                sent = {"x-session-id", "x-parent-session-id"} & call.headers.keys()
                assert entry.model_extra["session_headers"] == {name: call.headers[name] for name in sent}


@pytest.mark.parametrize("scenario", list(OUTCOMES))
async def test_with_an_engine_without_ids_the_harness_sees_its_responses_and_every_call_has_a_reason(
    tmp_path: Path, scenario: str
) -> None:
    calls = exchanges(scenario)
    mismatch = {STORED: "token_count_mismatch"} if scenario == "main-chat" else PLAIN
    async with running_gateway(tmp_path, drain_seconds=0.2) as gateway:
        outcomes = await played(gateway, calls)
        assert outcomes == [mismatch.get(became, became) for became in OUTCOMES[scenario]]


async def test_the_harness_gets_what_the_engine_sent_byte_for_byte(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        for scenario in ("cut-mid", "ended-mid", "http-500-once", "http-429-once", "sub-agent", "title-500"):
            calls = exchanges(scenario)
            gateway.engine.handler = ScenarioEngine(calls)
            for call in calls:
                response = await gateway.post(call.path, call.body, scenario, **call.headers)
                # The stub's chunks have none of the fields that the gateway adds.
                assert response.body == call.payload


async def test_a_title_a_main_agent_and_its_sub_agent_are_told_apart_by_their_headers(tmp_path: Path) -> None:
    calls = [with_token_ids(call) for call in exchanges("sub-agent")]
    async with running_gateway(tmp_path, engine="vllm") as gateway:
        gateway.engine.handler = ScenarioEngine(calls)
        for call in calls:
            await gateway.post(call.path, call.body, "r1", **call.headers)
        snapshot = await gateway.store.freeze("r1")
        assert not snapshot.incomplete
        sessions = [(entry.model_extra or {})["session_headers"] for entry in snapshot.entries]
        main = sessions[0]["x-session-id"]
        assert [call.label for call in calls] == ["title", "main", "sub-agent", "sub-agent", "main"]
        assert [session["x-session-id"] == main for session in sessions] == [True, True, False, False, True]
        assert [session.get("x-parent-session-id") for session in sessions] == [None, None, main, main, None]
        # Title, main and sub-agent begin anew, so the rollout has several roots, and is not delivered as one.
        assert run_builder(snapshot.entries).notes.roots > 1


async def test_a_call_that_is_retried_after_a_break_is_stored_once_and_its_rollout_stays_masked(
    tmp_path: Path,
) -> None:
    calls = [with_token_ids(call) for call in exchanges("cut-mid")]
    async with running_gateway(tmp_path, engine="vllm") as gateway:
        gateway.engine.handler = ScenarioEngine(calls)
        for call in calls:
            await gateway.post(call.path, call.body, "r1", **call.headers)
        detail = await gateway.store.describe_rollout("r1")
        assert len(detail.calls) == 4
        assert [intent.outcome for intent in detail.intents] == [None]
        assert [flag.reason for flag in detail.flags] == ["lost_stream"]
        assert calls[2].body == calls[3].body, "OpenCode repeats the same bytes"
        assert (await gateway.store.freeze("r1")).incomplete


async def test_the_engine_may_finish_what_a_killed_harness_began(tmp_path: Path) -> None:
    first, broken = (with_token_ids(call) for call in exchanges("killed-mid-stream"))
    whole = with_token_ids(exchanges("main-chat")[1])
    async with running_gateway(tmp_path, engine="vllm") as gateway:
        go_on = asyncio.Event()
        head, rest = whole.payload[: len(whole.payload) // 2], whole.payload[len(whole.payload) // 2 :]
        gateway.engine.handler = pausing(head, go_on, rest)
        async with gateway.session.post(
            gateway.base() + broken.path, data=broken.body, headers=broken.headers
        ) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        go_on.set()

        async def stored() -> bool:
            return len(await gateway.store.read_entries("r1")) == 1

        await until(stored)
        entry = await gateway.entry()
        assert len(entry.generation_token_ids) == 42
        assert json.loads(first.body)["messages"]
        assert not (await gateway.store.freeze("r1")).incomplete


async def test_what_harnesses_ask_beside_their_calls_records_nothing(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        gateway.engine.handler = answering({"input_tokens": 3})
        await gateway.post("/v1/messages/count_tokens?beta=true", {"model": "tiny"}, "beside")
        await gateway.request("HEAD", gateway.base("beside"))
        upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        refused = await gateway.request("GET", gateway.base("beside") + "/v1/responses", headers=upgrade)
        assert refused.status == 426
        assert "beside" not in [summary.rollout_id for summary in await gateway.store.list_rollouts()]
