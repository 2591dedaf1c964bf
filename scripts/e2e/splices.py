"""Spliced calls as they went over the wire: what the engine was sent, what it read, and what its template writes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from e2e.responses import parts_of
from e2e.tap import Exchange, Tap, tapped
from token_id_capture.provenance import Mode, Policy
from token_id_capture.records import TokenEntry

_OF_THE_PROMPT = ("model", "messages", "tools", "chat_template_kwargs")


@dataclass
class Checked:
    """How many spliced calls were looked at, and what was wrong with which."""

    calls: int = 0
    problems: list[str] = field(default_factory=list)


@asynccontextmanager
async def tapped_url(url: str) -> AsyncIterator[tuple[str, Tap]]:
    """A tap in front of the engine at ``url``, and where it listens."""
    async with tapped(URL(url).port or 80) as tap:
        yield f"http://127.0.0.1:{tap.port}", tap


async def check_splices(
    url: str, policy: Policy, rollouts: Sequence[Sequence[TokenEntry]], exchanges: Sequence[Exchange]
) -> Checked:
    """Hold each spliced call of the rollouts against its exchange.

    - The engine read the ids that it was sent, which begin with the exact tokens of the call that is continued.
    - Between the answers of the policy stands what the template writes there.
    - With the policy ``template`` the prompt reads like the template's own.
    """
    checked = Checked()
    by_response = {
        _response_id(exchange): exchange for exchange in exchanges if exchange.path == "/v1/chat/completions"
    }
    async with aiohttp.ClientSession(url) as engine:
        for entries in rollouts:
            calls = {entry.model_call_id: entry for entry in entries}
            for entry in entries:
                if entry.continuity is None or entry.continuity.mode is not Mode.SPLICED:
                    continue
                checked.calls += 1
                exchange = by_response[entry.response_id or ""]
                found = [problem async for problem in _problems(engine, policy, entry, calls, exchange)]
                checked.problems += [f"{entry.rollout_id} {entry.model_call_id}: {problem}" for problem in found]
    return checked


async def _problems(
    engine: aiohttp.ClientSession,
    policy: Policy,
    entry: TokenEntry,
    calls: Mapping[str, TokenEntry],
    exchange: Exchange,
) -> AsyncIterator[str]:
    sent = (exchange.sent.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if not sent:
        yield "it was sent no ids"
        return
    if sent != _read_prompt(exchange):
        yield "the engine read other ids than it was sent"
    answers = [*_answers(entry, calls)]
    if any(sent[begin:end] != known for begin, end, known in answers):
        yield "the exact tokens of an answer are not where they were"
    rendered = await _rendered(engine, exchange, generation=True)
    if policy is Policy.TEMPLATE and await _text(engine, exchange, sent) != rendered:
        yield "it reads otherwise than the template's prompt"
    # Some templates begin an answer that is still to come otherwise than one of the history.
    opening = rendered.removeprefix(await _rendered(engine, exchange, generation=False))
    *before, last = [await _text(engine, exchange, ids) for ids in _between(sent, answers)]
    if not all(text.endswith(opening) for text in before):
        yield f"an answer does not begin with {opening!r}"
    between = [*(text.removesuffix(opening) for text in before), last]
    if not re.fullmatch("(?s:.*?)".join(map(re.escape, between)), rendered):
        yield f"the text between the answers is not the template's: {between!r} in {rendered!r}"


def _answers(entry: TokenEntry, calls: Mapping[str, TokenEntry]) -> Iterator[tuple[int, int, list[int]]]:
    """Where in the call's prompt the answers that it continues begin and end, the last one first, and their ids."""
    while entry.continuity is not None and entry.continuity.parent_call_id is not None:
        entry = calls[entry.continuity.parent_call_id]
        begin, known = len(entry.prompt_token_ids), [*entry.generation_token_ids]
        yield begin, begin + len(known), known


def _between(ids: list[int], answers: Sequence[tuple[int, int, list[int]]]) -> Iterator[list[int]]:
    place = 0
    for begin, end, _ in reversed(answers):
        yield ids[place:begin]
        place = end
    yield ids[place:]


async def _rendered(engine: aiohttp.ClientSession, exchange: Exchange, *, generation: bool) -> str:
    """What the template makes of the chat."""
    question = {name: exchange.sent[name] for name in _OF_THE_PROMPT if name in exchange.sent}
    answer = await _asked(engine, "/tokenize", {**question, "add_generation_prompt": generation})
    return await _text(engine, exchange, answer["tokens"])


async def _text(engine: aiohttp.ClientSession, exchange: Exchange, ids: list[int]) -> str:
    if not ids:
        return ""
    text: str = (await _asked(engine, "/detokenize", {"model": exchange.sent["model"], "tokens": ids}))["prompt"]
    return text


async def _asked(engine: aiohttp.ClientSession, path: str, question: Mapping[str, Any]) -> dict[str, Any]:
    async with engine.post(path, json=question) as response:
        response.raise_for_status()
        answer: dict[str, Any] = await response.json()
        return answer


def _parts(exchange: Exchange) -> list[dict[str, Any]]:
    return parts_of(exchange.body, exchange.content_type.startswith("text/event-stream"))


def _response_id(exchange: Exchange) -> str:
    return next((str(part["id"]) for part in _parts(exchange) if "id" in part), "")


def _read_prompt(exchange: Exchange) -> list[int] | None:
    return next((part["prompt_token_ids"] for part in _parts(exchange) if part.get("prompt_token_ids")), None)
