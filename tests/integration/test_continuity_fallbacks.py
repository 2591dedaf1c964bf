"""Whatever leaves a doubt gets the template's prompt, with a reason; no call fails because of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from support.made_up import CHAT
from support.multi_turn import TOOLS
from support.replay import Gateway, running_gateway
from token_id_capture import reasons
from token_id_capture.errors import ConfigurationError
from token_id_capture.provenance import Continuity, KnownCall
from token_id_capture.server.app import create_app
from token_id_capture.server.continuity import continuer
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing.engine import PolicyEngine
from token_id_capture.testing.serving import serve_engine
from token_id_capture.testing.template import END_OF_TURN, Habits, render_chat
from token_id_capture.tokens import TokenIds

Change = Callable[[dict[str, Any], list[int]], list[int]]
DROPS = Habits(reasoning=True)


class Tokenizing(PolicyEngine):
    """Counts what it is asked to render, and answers with what ``change`` makes of it."""

    def __init__(self, change: Change | None = None, status: int = 200, **options: Any) -> None:
        self.change = change or (lambda body, tokens: tokens)
        self.status = status
        self.rendered = 0
        super().__init__(**{"habits": DROPS, **options})

    async def _tokenize(self, request: Request) -> Response:
        self.rendered += 1
        if self.status != 200:
            return Response(status_code=self.status)
        body = await request.json()
        response = await super()._tokenize(request)
        answer = json.loads(bytes(response.body))
        return JSONResponse({**answer, "tokens": self.change(body, answer["tokens"])})


@dataclass
class Talk:
    """One rollout through a gateway."""

    gateway: Gateway
    engine: Tokenizing
    name: str = "r1"

    async def ask(self, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
        """The answer's message; the call has to succeed."""
        body = {"model": "policy", "messages": list(messages), "tools": TOOLS, "max_tokens": 60, "seed": 3, **fields}
        response = await self.gateway.post(CHAT, body, self.name)
        assert response.status == 200, response.body
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message

    async def outcomes(self) -> list[str]:
        """How the prompt of each call was made, in the order of the calls."""
        return [made.outcome for made in await self.made()]

    async def made(self) -> list[Continuity]:
        """The same with all particulars."""
        found = [entry.continuity for entry in await self.gateway.store.read_entries(self.name)]
        return [made for made in found if made is not None]


@contextlib.asynccontextmanager
async def talking(
    tmp_path: Path, engine: Tokenizing | None = None, continuity: str = "exact", **options: Any
) -> AsyncIterator[Talk]:
    engine = engine or Tokenizing()
    async with (
        serve_engine(engine) as url,
        running_gateway(
            tmp_path / "captures.db", upstream=url, engine="vllm", continuity=continuity, **options
        ) as gateway,
    ):
        yield Talk(gateway, engine)


ASKED: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]


def following(answer: dict[str, Any]) -> list[dict[str, Any]]:
    calls = answer.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
    return results or [{"role": "user", "content": "Go on."}]


def edited(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [*ASKED, {**answer, "content": f"{answer['content']} And more."}, *following(answer)]


def with_other_reasoning(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [*ASKED, {**answer, "reasoning": "Something else."}, *following(answer)]


def with_another_system_prompt(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be long."}, ASKED[1], answer, *following(answer)]


def compacted(answer: dict[str, Any]) -> list[dict[str, Any]]:
    summary = [{"role": "user", "content": "So far: you said hello."}, {"role": "assistant", "content": "Understood."}]
    return [ASKED[0], *summary, *following(answer)]


def of_another_agent(answer: dict[str, Any]) -> list[dict[str, Any]]:
    theirs = [{"role": "user", "content": "You are a helper."}, {"role": "assistant", "content": "I help."}]
    return [*theirs, {"role": "user", "content": "Go on."}]


def with_an_image(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [*ASKED, answer, {"role": "user", "content": [{"type": "image_url", "image_url": {}, "text": "seen"}]}]


def unchanged(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [*ASKED, answer, *following(answer)]


PROMPT_FIELDS: list[dict[str, Any]] = [
    {"chat_template": "{{ messages }}"},
    {"documents": []},
    {"truncate_prompt_tokens": 100},
    {"echo": True},
    {"add_special_tokens": True},
    {"kv_transfer_params": {"do_remote_prefill": True}},
]


@pytest.mark.parametrize(
    ("restate", "fields", "reason"),
    [
        (edited, {}, reasons.UNKNOWN_HISTORY),
        (with_another_system_prompt, {}, reasons.UNKNOWN_HISTORY),
        (compacted, {}, reasons.UNKNOWN_HISTORY),
        (of_another_agent, {}, reasons.UNKNOWN_HISTORY),
        (unchanged, {"tools": []}, reasons.UNKNOWN_HISTORY),
        (unchanged, {"chat_template_kwargs": {"preserve_thinking": True}}, reasons.UNKNOWN_HISTORY),
        (with_other_reasoning, {}, reasons.REASONING_EDITED),
        (with_an_image, {}, reasons.MEDIA),
        (lambda answer: [*ASKED, answer], {}, reasons.ENDS_WITH_ANSWER),
        *[(unchanged, fields, reasons.PROMPT_FIELD) for fields in PROMPT_FIELDS],
        (unchanged, {}, "spliced"),
    ],
)
async def test_a_request_that_is_no_plain_continuation_is_left_as_it_is(
    tmp_path: Path, restate: Any, fields: dict[str, Any], reason: str
) -> None:
    async with talking(tmp_path) as talk:
        answer = await talk.ask(ASKED)
        await talk.ask(restate(answer), **fields)
        assert await talk.outcomes() == [reasons.FIRST, reason]
        sent = talk.engine.calls[-1].body
        if reason != "spliced":
            assert sent.get("kv_transfer_params") == fields.get("kv_transfer_params")
            made = (await talk.made())[-1]
            assert (made.parent_call_id, made.kept) == (None, 0)


def test_every_reason_is_the_outcome_of_a_test_here() -> None:
    tests = Path(__file__).read_text("utf-8")
    assert [reason for reason in reasons.CONTINUITY_REASONS if f"reasons.{reason.upper()}" not in tests] == []


async def test_answers_that_a_client_had_edited_before_are_not_restored_by_a_later_answer(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        first = await talk.ask(ASKED)
        second = await talk.ask(history := unchanged(first))
        history = [*ASKED, {**first, "reasoning": "Something else."}, *following(first)]
        await talk.ask([*history, second, *following(second)])
        assert await talk.outcomes() == [reasons.FIRST, "spliced", reasons.REASONING_EDITED]


def without_answers(body: dict[str, Any], tokens: list[int]) -> list[int]:
    return [token for token in tokens if token < 256]


def otherwise_ended(body: dict[str, Any], tokens: list[int]) -> list[int]:
    return [33 if token == END_OF_TURN else token for token in tokens]


def real_answers_otherwise(body: dict[str, Any], tokens: list[int]) -> list[int]:
    said = [message for message in body["messages"] if message["role"] == "assistant"]
    if not said:
        return tokens
    words = [said[-1]["content"], *(call["function"]["arguments"] for call in said[-1].get("tool_calls") or ())]
    return tokens if {"a", "b", '{"a":"a"}', '{"b":"b"}'} & set(words) else [*tokens, 33]


def shifted(body: dict[str, Any], tokens: list[int]) -> list[int]:
    return [33, *tokens]


def blind(body: dict[str, Any], tokens: list[int]) -> list[int]:
    return [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (otherwise_ended, reasons.STOP_TOKEN_UNKNOWN),
        (real_answers_otherwise, reasons.TAIL_DIFFERS),
        (blind, reasons.TEMPLATE_IGNORES_ANSWER),
        (shifted, reasons.RENDER_DIFFERS),
        (lambda body, tokens: [], reasons.RENDER_FAILED),
        (lambda body, tokens: [*tokens, "x"], reasons.RENDER_FAILED),
    ],
)
async def test_a_template_that_leaves_a_doubt_is_left_to_itself(tmp_path: Path, change: Change, reason: str) -> None:
    async with talking(tmp_path, Tokenizing(change)) as talk:
        answer = await talk.ask(ASKED)
        await talk.ask(unchanged(answer))
        assert await talk.outcomes() == [reasons.FIRST, reason]
        assert "kv_transfer_params" not in talk.engine.calls[-1].body


async def test_an_engine_without_a_tokenizer_endpoint_serves_as_ever(tmp_path: Path) -> None:
    async with talking(tmp_path, Tokenizing(status=404)) as talk:
        await talk.ask(unchanged(await talk.ask(ASKED)))
        assert await talk.outcomes() == [reasons.FIRST, reasons.RENDER_FAILED]


async def test_a_tokenizer_that_does_not_answer_holds_a_call_only_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuer, "_LONGEST", 0.2)

    class Silent(Tokenizing):
        async def _tokenize(self, request: Request) -> Response:
            await asyncio.Event().wait()
            raise AssertionError

    async with talking(tmp_path, Silent()) as talk:
        await talk.ask(unchanged(await talk.ask(ASKED)))
        assert await talk.outcomes() == [reasons.FIRST, reasons.RENDER_FAILED]


async def test_a_store_that_fails_to_look_up_costs_only_the_continuity(tmp_path: Path) -> None:
    class Failing(TokenCaptureStore):
        async def find_calls(self, rollout_id: str, chains: Sequence[bytes]) -> list[KnownCall]:
            raise OSError("the disk is gone")

    async with talking(tmp_path, store=Failing(tmp_path / "captures.db")) as talk:
        await talk.ask(unchanged(await talk.ask(ASKED)))
        assert await talk.outcomes() == [reasons.FIRST, reasons.CONTINUITY_FAILED]


async def test_the_template_policy_never_changes_the_text(tmp_path: Path) -> None:
    async with talking(tmp_path, continuity="template") as talk:
        await talk.ask(unchanged(await talk.ask(ASKED)))
        assert await talk.outcomes() == [reasons.FIRST, reasons.TEXT_DIFFERS]


async def test_the_template_policy_keeps_the_cut_of_the_policy_where_the_text_is_the_same(tmp_path: Path) -> None:
    async with talking(tmp_path, Tokenizing(habits=Habits(merges=True)), "template") as talk:
        for seed in range(20):
            talk.name = f"r{seed}"
            answer = await talk.ask(ASKED, seed=seed, tools=[])
            if "  " in (answer["content"] or ""):
                break
        await talk.ask(unchanged(answer), tools=[])
        assert await talk.outcomes() == [reasons.FIRST, "spliced"]
        first, second = await talk.gateway.store.read_entries(talk.name)
        known = len(first.prompt_token_ids) + len(first.generation_token_ids)
        _, made = await talk.made()
        assert made.parent_call_id == first.model_call_id
        assert (made.kept, made.added) == (known, len(second.prompt_token_ids) - known)
        assert made.diverges_at is not None
        assert len(first.prompt_token_ids) < made.diverges_at < known


async def test_exact_tokens_that_no_longer_fit_give_way_to_a_template_that_drops_some(tmp_path: Path) -> None:
    engine = Tokenizing()
    async with talking(tmp_path, engine) as talk:
        answer = await talk.ask(ASKED)
        (first,) = await talk.gateway.store.read_entries("r1")
        engine.max_model_len = len(first.prompt_token_ids) + len(first.generation_token_ids) + 5
        await talk.ask(unchanged(answer), max_tokens=1)
        assert await talk.outcomes() == [reasons.FIRST, reasons.NO_ROOM]


async def test_an_engine_that_ignores_the_ids_is_found_out_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with talking(tmp_path, Tokenizing(takes_prompt_ids=False)) as talk:
        answer = await talk.ask(ASKED)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                await talk.ask(unchanged(answer))
        assert await talk.outcomes() == [reasons.FIRST, reasons.ENGINE_IGNORED_IDS, reasons.ENGINE_IGNORED_IDS]
        assert [record.getMessage()[:17] for record in caplog.records] == ["continuity is off"]
        assert ["kv_transfer_params" in call.body for call in talk.engine.calls] == [False, True, False]
        _, stored, _ = await talk.gateway.store.read_entries("r1")
        assert stored.prompt_token_ids != talk.engine.calls[1].body["kv_transfer_params"]["prompt_token_ids"]


async def test_calls_without_history_and_calls_with_continuity_off_ask_nothing(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        await talk.ask(ASKED)
        assert talk.engine.rendered == 0
    async with talking(tmp_path, continuity="off") as talk:
        talk.name = "r2"
        await talk.ask(unchanged(await talk.ask(ASKED)))
        assert talk.engine.rendered == 0
        assert [entry.continuity for entry in await talk.gateway.store.read_entries("r2")] == [None, None]


@pytest.mark.parametrize("engine", ["llama-cpp", "auto"])
def test_an_engine_that_takes_no_ids_is_a_configuration_error_that_names_it(tmp_path: Path, engine: str) -> None:
    store = TokenCaptureStore(tmp_path / "captures.db")
    with pytest.raises(ConfigurationError, match="llama-cpp" if engine == "llama-cpp" else "not known"):
        create_app("http://127.0.0.1:1", store, engine=engine, settings=GatewaySettings(continuity="exact"))
    with pytest.raises(ConfigurationError, match=r"message.*use exact"):
        create_app("http://127.0.0.1:1", store, engine="message", settings=GatewaySettings(continuity="template"))


def test_a_sink_that_cannot_find_calls_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="NoneType"):
        create_app("http://127.0.0.1:1", None, engine="vllm", settings=GatewaySettings(continuity="exact"))


class Splicing(PolicyEngine):
    """Puts its own rendering of what follows behind the ids that a chat has to begin with, as NeMo-RL's server does,
    and its token arrays on the message."""

    def __init__(self, *, heeds: bool = True, **options: Any) -> None:
        self.heeds = heeds
        super().__init__(**options)

    async def _chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        known = body.pop("required_prefix_token_ids", None)
        if known is not None and self.heeds:
            answers = [place for place, message in enumerate(body["messages"]) if message["role"] == "assistant"]
            closed = render_chat(body["messages"][: answers[-1] + 1], body.get("tools"), generation=False, habits=DROPS)
            whole = render_chat(body["messages"], body.get("tools"), habits=DROPS)
            body["kv_transfer_params"] = {"prompt_token_ids": [*known, *whole[len(closed) :]]}
        request._body = json.dumps({**body, "logprobs": True, "return_token_ids": True}).encode()
        response = await super()._chat(request)
        answer = json.loads(bytes(response.body))
        (choice,) = answer["choices"]
        choice["message"] |= {
            "prompt_token_ids": answer.pop("prompt_token_ids"),
            "generation_token_ids": choice.pop("token_ids"),
            "generation_log_probs": [entry["logprob"] for entry in choice.pop("logprobs")["content"]],
        }
        return JSONResponse(answer)


@pytest.mark.parametrize(("heeds", "second"), [(True, "spliced"), (False, reasons.ENGINE_IGNORED_IDS)])
async def test_a_server_that_splices_itself_gets_the_tokens_to_begin_with(
    tmp_path: Path, heeds: bool, second: str
) -> None:
    engine = Splicing(heeds=heeds, habits=DROPS)
    async with (
        serve_engine(engine) as url,
        running_gateway(tmp_path / "captures.db", upstream=url, engine="message", continuity="exact") as gateway,
    ):
        body = {"model": "policy", "messages": ASKED, "max_tokens": 60, "seed": 4}
        answer = (await gateway.post(CHAT, body)).json()["choices"][0]["message"]
        assert "generation_token_ids" not in answer
        response = await gateway.post(CHAT, {**body, "messages": unchanged(answer)})
        assert response.status == 200
        first, last = await gateway.store.read_entries("r1")
        assert first.continuity is not None
        assert last.continuity is not None
        assert [first.continuity.outcome, last.continuity.outcome] == [reasons.FIRST, second]
        known = [*first.prompt_token_ids, *first.generation_token_ids]
        assert last.prompt_token_ids.startswith(TokenIds(known)) is heeds
        if heeds:
            assert last.continuity.added == len(last.prompt_token_ids) - len(known)


async def test_calls_are_counted_by_how_their_prompt_was_made(tmp_path: Path) -> None:
    async with talking(tmp_path) as talk:
        await talk.ask(unchanged(await talk.ask(ASKED)))
        text = (await talk.gateway.request("GET", talk.gateway.url + "/metrics")).body.decode()
        assert 'tokcap_continuity_total{outcome="first"} 1.0' in text
        assert 'tokcap_continuity_total{outcome="spliced"} 1.0' in text
        assert "tokcap_continuity_seconds_count 2.0" in text
