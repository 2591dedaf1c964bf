"""A small agent harness: it keeps a conversation, calls the model, and answers the model's tool calls.

It returns the assistant's message to the model exactly as it came, so its prompts only ever grow,
unless a test rewrites ``messages``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

RunTool = Callable[[str, str], str]


class NotConnectedError(ConnectionError):
    """Nobody listens: nothing was sent."""


class BrokenCallError(ConnectionError):
    """The connection broke before the response was complete: what the model generated is unknown."""


@dataclass(frozen=True)
class Answer:
    """One response of the model. ``completion_tokens`` is the engine's count."""

    message: dict[str, Any]
    finish_reason: str | None
    completion_tokens: int


class CallRefusedError(Exception):
    """The model's server answered with an error; ``status`` and ``body`` are that answer."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status = status
        self.body = body


@dataclass
class ChatAgent:
    """One conversation with ``{base_url}/chat/completions``; use it as ``async with ChatAgent(...)``.

    ``options`` are further fields of each request, such as ``max_tokens``. ``run_tool`` is given a
    tool's name and arguments, both as the model wrote them, and returns the result's text. Each call
    has a connection of its own, so none is left to a server process that ended meanwhile.
    """

    base_url: str
    model: str
    messages: list[dict[str, Any]]
    stream: bool = False
    tools: Sequence[dict[str, Any]] = ()
    run_tool: RunTool = lambda name, arguments: "done"
    options: dict[str, Any] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def ask(self) -> Answer:
        """Send the conversation; the answer is not yet part of it, so asking again is a retry.

        Raises:
            CallRefusedError: the status was not 200.
            NotConnectedError: nobody listens.
            BrokenCallError: the connection broke before the response was complete.
        """
        body: dict[str, Any] = {"model": self.model, "messages": self.messages, **self.options}
        if self.tools:
            body["tools"] = list(self.tools)
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._session.post(f"{self.base_url}/chat/completions", json=body) as response:
                if response.status != 200:
                    raise CallRefusedError(response.status, await response.text())
                return await _read_stream(response) if self.stream else _read_whole(await response.json())
        except aiohttp.ClientConnectorError as error:
            raise NotConnectedError(str(error)) from error
        except aiohttp.ClientError as error:
            raise BrokenCallError(str(error) or type(error).__name__) from error

    def accept(self, answer: Answer, otherwise: str) -> None:
        """Continue from an answer: with the results of its tool calls, or else with what the user says."""
        self.messages.append(answer.message)
        calls = answer.message.get("tool_calls") or []
        for call in calls:
            result = self.run_tool(call["function"]["name"], call["function"]["arguments"])
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not calls:
            self.messages.append({"role": "user", "content": otherwise})


def _read_whole(response: dict[str, Any]) -> Answer:
    (choice,) = response["choices"]
    return Answer(choice["message"], choice["finish_reason"], response["usage"]["completion_tokens"])


async def _read_stream(response: aiohttp.ClientResponse) -> Answer:
    """Join the deltas of a stream.

    Raises:
        BrokenCallError: the stream ended before its ``[DONE]``.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    finish_reason, completion_tokens = None, 0
    async for line in response.content:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"":
            continue
        if data == b"[DONE]":
            message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
            if thoughts:
                message["reasoning"] = "".join(thoughts)
            if calls:
                message["tool_calls"] = [calls[index] for index in sorted(calls)]
            return Answer(message, finish_reason, completion_tokens)
        chunk = json.loads(data)
        completion_tokens = (chunk.get("usage") or {}).get("completion_tokens", completion_tokens)
        for choice in chunk["choices"]:
            texts.append(choice["delta"].get("content") or "")
            thoughts += [piece] if (piece := choice["delta"].get("reasoning")) else []
            finish_reason = choice["finish_reason"] or finish_reason
            for delta in choice["delta"].get("tool_calls") or ():
                _add_call(calls, delta)
    raise BrokenCallError("the stream ended before [DONE]")


def _add_call(calls: dict[int, dict[str, Any]], delta: dict[str, Any]) -> None:
    call = calls.setdefault(delta["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] += delta.get("id") or ""
    for part in ("name", "arguments"):
        call["function"][part] += delta["function"].get(part) or ""
