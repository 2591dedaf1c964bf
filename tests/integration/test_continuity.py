"""With ``--continuity`` a rollout is one exact sequence, however its harness restates the history."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.made_up import CHAT
from support.multi_turn import TOOLS, built, greatest_difference, run
from support.replay import Gateway, running_gateway
from support.served import serving
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing.engine import PolicyEngine
from token_id_capture.testing.policy import Policy
from token_id_capture.testing.serving import serve_engine
from token_id_capture.testing.template import Habits

DROPS = Habits(reasoning=True)
TIDIES = Habits(reasoning=True, tidies=True)
PLAIN = Habits(tidies=True)


@contextlib.asynccontextmanager
async def gateway(tmp_path: Path, engine: PolicyEngine, continuity: str, **options: Any) -> AsyncIterator[Gateway]:
    async with (
        serve_engine(engine) as url,
        running_gateway(
            tmp_path / "captures.db", upstream=url, engine="vllm", continuity=continuity, **options
        ) as found,
    ):
        yield found


@pytest.mark.parametrize("habits", [PLAIN, DROPS, TIDIES], ids=["tidying", "dropping", "both"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_every_rollout_is_one_sequence_with_exact(tmp_path: Path, habits: Habits, stream: bool) -> None:
    async with gateway(tmp_path, PolicyEngine(habits=habits), "exact") as found:
        rollouts = await run(found.url, found.store, 12, stream=stream)
    assert rollouts.delivered == 12
    assert set(rollouts.outcomes) <= {"first", "spliced", "clean"}
    assert max(greatest_difference(build, Policy()) for build in rollouts.builds.values()) < 1e-9


ASKED: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]


async def ask(found: Gateway, messages: list[Any], name: str = "r1", **fields: Any) -> list[dict[str, Any]]:
    """The messages of the choices that come back."""
    body = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 60, "seed": 7, **fields}
    response = await found.post(CHAT, body, name)
    assert response.status == 200, response.body
    return [choice["message"] for choice in response.json()["choices"]]


def after(messages: list[Any], answer: dict[str, Any]) -> list[Any]:
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in answer.get("tool_calls") or []
    ]
    return [*messages, answer, *(results or [{"role": "user", "content": "Go on."}])]


async def of(found: Gateway, *names: str) -> Any:
    return await built(found.store, list(names))


async def test_n_choices_of_which_the_second_is_continued_are_one_sequence(tmp_path: Path) -> None:
    async with gateway(tmp_path, PolicyEngine(habits=DROPS), "exact") as found:
        _, second, _ = await ask(found, ASKED, n=3, tool_choice="none")
        (third,) = await ask(found, history := after(ASKED, second))
        await ask(found, after(history, third))
        rollouts = await of(found, "r1")
    assert rollouts.delivered == 1
    assert rollouts.outcomes == {"first": 3, "spliced": 2}


@pytest.mark.parametrize("used", [0, 1])
async def test_after_a_retry_whichever_answer_is_used_there_is_one_sequence(tmp_path: Path, used: int) -> None:
    async with gateway(tmp_path, PolicyEngine(habits=DROPS), "exact") as found:
        (first,) = await ask(found, ASKED)
        answers = [(await ask(found, after(ASKED, first), seed=seed))[0] for seed in (1, 2)]
        await ask(found, after(after(ASKED, first), answers[used]))
        rollouts = await of(found, "r1")
    assert rollouts.delivered == 1
    assert rollouts.outcomes == {"first": 1, "spliced": 3}


async def test_a_forced_call_parts_of_text_and_an_answer_put_in_are_continued(tmp_path: Path) -> None:
    async with gateway(tmp_path, PolicyEngine(habits=TIDIES), "exact") as found:
        (first,) = await ask(found, ASKED, tool_choice="required")
        parts = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, ASKED[1]]
        (second,) = await ask(found, history := after(parts, first), tool_choice="none")
        history = [
            *after(history, second),
            {"role": "assistant", "content": "Kept."},
            {"role": "user", "content": "On."},
        ]
        await ask(found, history)
        rollouts = await of(found, "r1")
    assert rollouts.delivered == 1
    assert rollouts.outcomes == {"first": 1, "spliced": 2}


async def test_two_branches_of_one_call_are_both_exact_and_stay_two_sequences(tmp_path: Path) -> None:
    async with gateway(tmp_path, PolicyEngine(habits=DROPS), "exact") as found:
        (first,) = await ask(found, ASKED, tool_choice="none")
        for text in ("One way.", "Another way."):
            history = [*ASKED, first, {"role": "user", "content": text}]
            (second,) = await ask(found, history)
            await ask(found, after(history, second))
        rollouts = await of(found, "r1")
    (build,) = rollouts.builds.values()
    assert rollouts.outcomes == {"first": 1, "spliced": 4}
    assert [reason.partition(":")[0] for reason in build.reasons] == ["multiple_chains"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_what_was_added_is_hidden_from_the_client_byte_for_byte(tmp_path: Path, stream: bool) -> None:
    def comparable(body: bytes) -> bytes:
        return re.sub(rb'"(id|created)":("[^"]*"|\d+)', b"", body)

    engine = PolicyEngine(habits=DROPS)
    async with (
        serve_engine(engine) as url,
        running_gateway(tmp_path / "captures.db", upstream=url, engine="vllm", continuity="exact") as found,
    ):
        (first,) = await ask(found, ASKED, tool_choice="none")
        body = {"model": "policy", "messages": after(ASKED, first), "seed": 1, "max_tokens": 30}
        got = await found.post(CHAT, {**body, "tools": TOOLS, "stream": stream})
        given = {
            **body,
            "tools": TOOLS,
            "stream": stream,
            "kv_transfer_params": engine.calls[-1].body["kv_transfer_params"],
        }
        if stream:
            # The gateway leaves such a call alone, and asks for token ids as ever: more chunks come then.
            same = await found.post(CHAT, given, "another")
        else:
            same = await found.request("POST", url + CHAT, orjson.dumps(given), {"content-type": "application/json"})
        assert comparable(got.body) == comparable(same.body)
        assert (await of(found, "r1")).outcomes == {"first": 1, "spliced": 1}


async def test_workers_in_turn_and_a_process_that_is_killed_between_turns_make_one_sequence(tmp_path: Path) -> None:
    database = tmp_path / "captures.db"
    async with serve_engine(PolicyEngine(habits=DROPS)) as url:
        messages = list(ASKED)
        for turn in range(3):
            # Each turn through another process, the one before killed.
            async with serving(database, url, "--engine", "vllm", "--continuity") as server:
                body = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 60, "seed": turn}
                status, answered = await server.post(server.base() + CHAT, body)
                assert status == 200
                messages = after(messages, json.loads(answered)["choices"][0]["message"])
                server.process.kill()
        async with TokenCaptureStore(database) as store:
            rollouts = await built(store, ["r1"])
    assert rollouts.delivered == 1
    assert rollouts.outcomes == {"first": 1, "spliced": 2}


async def test_two_gateways_on_one_database_continue_each_others_calls(tmp_path: Path) -> None:
    async with serve_engine(PolicyEngine(habits=DROPS)) as url, contextlib.AsyncExitStack() as stack:
        options: Any = {"upstream": url, "engine": "vllm", "continuity": "exact"}
        pair = [await stack.enter_async_context(running_gateway(tmp_path / "captures.db", **options)) for _ in range(2)]
        messages: list[Any] = list(ASKED)
        for turn in range(5):
            (answer,) = await ask(pair[turn % 2], messages)
            messages = after(messages, answer)
        rollouts = await of(pair[0], "r1")
    assert rollouts.delivered == 1
    assert rollouts.outcomes == {"first": 1, "spliced": 4}


async def test_a_translated_dialect_is_a_chat_by_then_and_continues_its_calls_too(tmp_path: Path) -> None:
    async with gateway(tmp_path, PolicyEngine(habits=TIDIES), "exact") as found:
        messages: list[Any] = [{"role": "user", "content": "Hello."}]
        for turn in range(3):
            # At temperature 0 the answer has text each time; a sampled one may be cut off while it still reasons.
            body = {"model": "policy", "max_tokens": 60, "messages": messages, "system": "Be brief.", "temperature": 0}
            response = await found.post("/v1/messages", {**body, "stream": False})
            assert response.status == 200, response.body
            text = "".join(block.get("text", "") for block in response.json()["content"])
            assert text
            messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": f"Go, {turn}."}]
        rollouts = await of(found, "r1")
    assert rollouts.delivered == 1
    assert rollouts.outcomes["spliced"] == rollouts.calls - 1 > 0
