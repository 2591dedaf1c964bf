"""Agents of several turns that restate their history in the ways of real harnesses."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from token_id_capture.rebuild import Build, build_snapshot
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.testing.agent import ChatAgent
from token_id_capture.testing.policy import Policy

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


class Echo(Enum):
    """How a harness gives an answer back."""

    AS_IT_CAME = "as it came"
    WITHOUT_REASONING = "without reasoning"
    REWRITTEN = "without reasoning, with stripped text and arguments written anew"

    def of(self, message: dict[str, Any]) -> dict[str, Any]:
        if self is Echo.AS_IT_CAME:
            return message
        kept = {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}
        if self is Echo.WITHOUT_REASONING:
            return kept
        calls = [
            {**call, "function": {**call["function"], "arguments": rewritten(call["function"]["arguments"])}}
            for call in kept.get("tool_calls") or []
        ]
        stripped = (kept.get("content") or "").strip()
        return {"role": "assistant", "content": stripped or None, **({"tool_calls": calls} if calls else {})}


def rewritten(arguments: str) -> str:
    try:
        return json.dumps(dict(reversed(json.loads(arguments).items())), indent=1)
    except ValueError:
        return arguments


@dataclass
class Rollouts:
    """What became of some rollouts."""

    builds: dict[str, Build] = field(default_factory=dict)
    entries: list[Sequence[TokenEntry]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    calls: int = 0

    @property
    def delivered(self) -> int:
        return sum(build.deliverable for build in self.builds.values())


async def converse(
    base_url: str,
    number: int,
    echo: Echo,
    *,
    turns: int = 5,
    model: str = "policy",
    stream: bool = False,
    **options: Any,
) -> None:
    """One rollout; its system prompt is its own."""
    messages = [
        {"role": "system", "content": f"You are agent {number}."},
        {"role": "user", "content": f"Begin with {number}."},
    ]
    wanted = {name: value for name, value in {"max_tokens": 80, "seed": number, **options}.items() if value is not None}
    async with ChatAgent(base_url, model, messages, stream=stream, tools=TOOLS, options=wanted) as agent:
        for turn in range(turns):
            answer = await agent.ask()
            agent.accept(answer, otherwise=f"Go on, {turn}.")
            place = max(at for at, message in enumerate(agent.messages) if message["role"] == "assistant")
            agent.messages[place] = echo.of(agent.messages[place])


async def run(gateway_url: str, store: TokenCaptureStore, count: int, **options: Any) -> Rollouts:
    """Rollouts that echo each in its own way, a third each; frozen and built when they are over."""
    names = [f"rollout-{number}" for number in range(count)]
    limit = asyncio.Semaphore(8)

    async def one(number: int) -> None:
        async with limit:
            base = f"{gateway_url}/ng-rollout/{names[number]}/training-token-capture/v1"
            await converse(base, number, list(Echo)[number % len(Echo)], **options)

    await asyncio.gather(*map(one, range(count)))
    return await built(store, names)


async def built(store: TokenCaptureStore, names: list[str]) -> Rollouts:
    found = Rollouts()
    for name in names:
        snapshot = await store.freeze(name)
        assert not snapshot.incomplete
        found.calls += len(snapshot.entries)
        found.entries.append(snapshot.entries)
        for entry in snapshot.entries:
            found.outcomes[entry.continuity.outcome if entry.continuity else "none"] += 1
        found.builds[name] = build_snapshot(snapshot)
    return found


def greatest_difference(build: Build, policy: Policy) -> float:
    """Between the captured log probabilities and those of the policy that reads the whole sequence at once."""
    sequence = build.trajectory()
    scored = policy.log_probs_of(sequence.token_ids.tolist())
    pairs = zip(sequence.loss_mask, sequence.log_probs, scored, strict=True)
    return max(abs(captured - again) for trained, captured, again in pairs if trained)
