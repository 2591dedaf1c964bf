"""Agents that play a story against the gateway, and keep every byte that they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from e2e.responses import Json, messages_of, parts_of
from e2e.stories import Act, Kind, Story, Turn
from e2e.tap import TAG_HEADER

MODEL = "tiny"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_TOOL_RESULTS = ("sunny, 12 degrees", "cloudy, 21 degrees")
_FIELDS: Mapping[Act, Json] = {
    Act.TWO_CHOICES: {"n": 2},
    Act.SHORT: {"max_tokens": 6},
    Act.STOP: {"stop": [" a", "er", " is"]},
}
_EVENTS_BEFORE_HANG_UP = 4
# Longer than any response in this run, even on a machine that does much else.
_PATIENCE = aiohttp.ClientTimeout(total=300)


@dataclass
class Attempt:
    """One request of an agent, and what came back."""

    tag: str
    rollout_id: str
    turn: int
    kind: Kind
    asks: bool
    streamed: bool
    status: int = 0
    body: bytes = b""
    hung_up: bool = False


class Dialect(Protocol):
    """What clients of an engine must know of it."""

    sampling: Mapping[str, Any]
    """Fields with which it samples from the model's own distribution."""
    asking: Mapping[str, Json]
    """By path, the fields of a client that wants token ids and log probabilities itself."""
    refused: Mapping[str, Any]
    """Fields with which it refuses any request."""

    def tokenize(self, text: str) -> Json:
        """The body for its ``/tokenize``, special tokens of the text included and none added."""

    def ids_of(self, choice: Json) -> list[int]:
        """The generated ids in a choice of a response, or of a chunk, to a client that asked."""


@dataclass
class Agent:
    """Plays one story."""

    story: Story
    base_url: str
    dialect: Dialect
    attempts: list[Attempt] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def play(self) -> None:
        """Have the whole conversation."""
        conversation = _CONVERSATIONS[self.story.kind]()
        async with aiohttp.ClientSession(timeout=_PATIENCE) as session:
            for number, turn in enumerate(self.story.turns):
                await conversation.ask(self, session, turn)
                answer = await self._turn(session, conversation, number, turn)
                if answer is None:
                    return
                conversation.accept(self, answer)

    async def _turn(
        self, session: aiohttp.ClientSession, conversation: Conversation, number: int, turn: Turn
    ) -> _Answer | None:
        """One turn with its act; None ends the conversation."""
        body = {**conversation.body(), **self.dialect.sampling, "max_tokens": 64, "seed": turn.seed}
        if turn.act is Act.REFUSED:
            refusal = await self._call(
                session, conversation.path, {**body, **self.dialect.refused}, number, turn.stream
            )
            if not 400 <= refusal.status < 500:
                self.problems.append(f"{refusal.tag}: the engine should refuse it, and answered {refusal.status}")
        if turn.act is Act.RETRY:
            await self._call(session, conversation.path, body, number, turn.stream)
        if turn.act is Act.HANG_UP_EARLY:
            await self._call(session, conversation.path, body, number, turn.stream, patience=_patience(turn))
        if turn.act is Act.HANG_UP:
            await self._call(session, conversation.path, body, number, True, events=_EVENTS_BEFORE_HANG_UP)
            if number == len(self.story.turns) - 1:
                return None  # it never comes back: what the engine finished is the last call
        body |= {**_FIELDS.get(turn.act, {}), "seed": turn.seed + 1}
        at_end = turn.act is Act.HANG_UP_AT_END
        attempt = await self._call(session, conversation.path, body, number, turn.stream, until_finish=at_end)
        if attempt.status != 200:
            self.problems.append(f"{attempt.tag}: HTTP {attempt.status}: {attempt.body[:200]!r}")
            return None
        choice = 1 if turn.act is Act.TWO_CHOICES else 0
        parts = parts_of(attempt.body, attempt.streamed)
        return _Answer(messages_of(parts)[choice], parts, choice)

    async def _call(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: Json,
        turn: int,
        stream: bool,
        *,
        patience: float | None = None,
        events: int | None = None,
        until_finish: bool = False,
    ) -> Attempt:
        """Send a request. Hang up after ``patience`` seconds, ``events`` events, or at the finish reason."""
        tag = f"{self.story.rollout_id}/{len(self.attempts)}"
        attempt = Attempt(tag, self.story.rollout_id, turn, self.story.kind, self.story.asks, stream)
        self.attempts.append(attempt)
        if self.story.asks:
            body = {**body, **self.dialect.asking[path]}
        if stream:
            body = {**body, "stream": True, **({"stream_options": {"include_usage": True}} if self.story.asks else {})}
        url = self.base_url + path
        try:
            async with (
                asyncio.timeout(patience),
                session.post(url, json={"model": MODEL, **body}, headers={TAG_HEADER: tag}) as response,
            ):
                attempt.status = response.status
                await _read(response, attempt, events, until_finish)
        except TimeoutError:
            attempt.hung_up = patience is not None
            if patience is None:
                self.problems.append(f"{tag}: no whole response in {_PATIENCE.total:.0f} s")
        except aiohttp.ClientError as error:
            self.problems.append(f"{tag}: the response broke off: {error!r}")
        return attempt

    async def post(self, session: aiohttp.ClientSession, path: str, body: Json) -> Json:
        """A request that generates nothing."""
        async with session.post(self.base_url + path, json=body) as response:
            answer: Json = await response.json()
            return answer


def _patience(turn: Turn) -> float:
    """Seconds until an early hang-up: some before the request is out, some beside the first token."""
    return 0.002 + turn.seed % 40 / 1000


async def _read(response: aiohttp.ClientResponse, attempt: Attempt, events: int | None, until_finish: bool) -> None:
    """Read the response to its end, or close the connection in its middle."""
    seen = 0
    async for line in response.content:
        attempt.body += line
        seen += line.startswith(b"data:")
        finished = until_finish and b'"finish_reason":' in line and b'"finish_reason":null' not in line
        if finished or (events is not None and seen >= events):
            attempt.body += b"\n" if finished else b""  # the event's blank line, which was not waited for
            attempt.hung_up = True
            response.close()
            return


@dataclass(frozen=True)
class _Answer:
    """A response that the conversation continues: its choice of that number, and all the parts it came in."""

    message: Json
    parts: list[Json]
    choice: int


class Conversation:
    """A chat: messages that only grow, the assistant's exactly as they came."""

    path = "/v1/chat/completions"
    tools: tuple[Json, ...] = ()

    def __init__(self) -> None:
        self.messages: list[Json] = []

    async def ask(self, agent: Agent, session: aiohttp.ClientSession, turn: Turn) -> None:
        """Put the question, unless a tool's result is the next message."""
        if not self.messages or self.messages[-1]["role"] == "assistant":
            self.messages.append({"role": "user", "content": turn.question})

    def body(self) -> Json:
        """The request of this turn."""
        return {"messages": self.messages, **({"tools": list(self.tools)} if self.tools else {})}

    def accept(self, agent: Agent, answer: _Answer) -> None:
        """Continue from an answer."""
        self.messages.append(answer.message)
        for call in answer.message.get("tool_calls") or ():
            result = _TOOL_RESULTS[len(self.messages) % 2]
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


class _ToolConversation(Conversation):
    tools = tuple(TOOLS)


class _TextConversation(Conversation):
    """Text completions: the agent renders the chat itself."""

    path = "/v1/completions"

    def __init__(self) -> None:
        super().__init__()
        self._prompt = ""

    async def ask(self, agent: Agent, session: aiohttp.ClientSession, turn: Turn) -> None:
        self._prompt += f"<|im_start|>user\n{turn.question}<|im_end|>\n<|im_start|>assistant\n"

    def body(self) -> Json:
        return {"prompt": self._prompt}

    def accept(self, agent: Agent, answer: _Answer) -> None:
        self._prompt += f"{answer.message['content']}<|im_end|>\n"


class _TokenConversation(Conversation):
    """Completions of token arrays: the agent sends the ids back that it was given, so nothing ever drifts."""

    path = "/v1/completions"
    _END_OF_TURN = 2

    def __init__(self) -> None:
        super().__init__()
        self._prompt: list[int] = []

    async def ask(self, agent: Agent, session: aiohttp.ClientSession, turn: Turn) -> None:
        text = f"<|im_start|>user\n{turn.question}<|im_end|>\n<|im_start|>assistant\n"
        asked = agent.dialect.tokenize(f"\n{text}" if self._prompt else text)
        self._prompt = self._prompt + (await agent.post(session, "/tokenize", asked))["tokens"]

    def body(self) -> Json:
        return {"prompt": self._prompt}

    def accept(self, agent: Agent, answer: _Answer) -> None:
        choices = [choice for part in answer.parts for choice in part["choices"] if choice["index"] == answer.choice]
        ids = [token for choice in choices for token in agent.dialect.ids_of(choice)]
        end = [] if ids[-1:] == [self._END_OF_TURN] else [self._END_OF_TURN]
        self._prompt = self._prompt + ids + end


_CONVERSATIONS: dict[Kind, Any] = {
    Kind.CHAT: Conversation,
    Kind.TOOLS: _ToolConversation,
    Kind.TEXT: _TextConversation,
    Kind.TOKENS: _TokenConversation,
}
