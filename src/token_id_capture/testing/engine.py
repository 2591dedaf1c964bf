"""An inference engine for tests: the test policy behind vLLM's HTTP interface.

``PolicyEngine`` is an ASGI application with ``/v1/chat/completions``, ``/v1/completions``,
``/tokenize``, ``/detokenize``, ``/v1/models``, ``/version`` and ``/health``. It honours ``n``, ``seed``,
``temperature``, ``max_tokens``, ``logprobs``, ``top_logprobs``, ``return_token_ids``,
``return_tokens_as_token_ids``, ``stream``, ``stream_options.include_usage``, ``tools``,
``tool_choice`` and, in chats, ``kv_transfer_params.prompt_token_ids``. Other fields are accepted and
have no effect. ``serving`` puts it on a port.

To see how a system copes with an engine that fails, pass ``on_call``: it is awaited before each
generation, so it can hold the call, and may return a ``Failure`` or a ``BrokenResponse``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from token_id_capture.testing.policy import Policy
from token_id_capture.testing.request import (
    GenerationRequest,
    RefusedRequestError,
    chat_prompt,
    parse_body,
    prompt_text,
    read_chat_request,
    read_completion_request,
)
from token_id_capture.testing.template import APPENDING, Habits, encode, token_text
from token_id_capture.testing.wire import SYSTEM_FINGERPRINT, ChatResponse, Choice, CompletionResponse, WireResponse

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class EngineCall:
    """One generation request as it arrived: ``number`` counts from 1."""

    number: int
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """Answer with this status and vLLM's error body instead of generating."""

    status: int = 500
    message: str = "the engine failed"


@dataclass(frozen=True)
class BrokenResponse:
    """Generate, but cut the connection: a stream after so many frames, a whole response half-way."""

    after_frames: int = 0


OnCall = Callable[[EngineCall], Awaitable[Failure | BrokenResponse | None]]


class PolicyEngine:
    """The engine; an ASGI application. ``calls`` lists every generation request that arrived.

    ``max_model_len`` bounds prompt and generation together, in tokens; a token is a byte here.
    ``seconds_per_token`` is waited after each token. A client that hangs up ends its generation.
    ``habits`` are those of its chat template. Without ``takes_prompt_ids`` it ignores the ids that a
    chat brings, as vLLM did before 0.27.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        model: str = "policy",
        max_model_len: int = 16384,
        seconds_per_token: float = 0.0,
        habits: Habits = APPENDING,
        takes_prompt_ids: bool = True,
        on_call: OnCall | None = None,
    ) -> None:
        self.policy = policy or Policy()
        self.model = model
        self.max_model_len = max_model_len
        self.seconds_per_token = seconds_per_token
        self.habits = habits
        self.takes_prompt_ids = takes_prompt_ids
        self.calls: list[EngineCall] = []
        self._on_call = on_call
        self._app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/version", self._version),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: _detail, RefusedRequestError: _refusal},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        await self._app(scope, receive, send)

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        asked = read_chat_request(body, self.max_model_len, self.habits, takes_prompt_ids=self.takes_prompt_ids)
        return await self._answer(request, body, asked, ChatResponse(asked))

    async def _completion(self, request: Request) -> Response:
        body = await self._body(request)
        asked = read_completion_request(body, self.max_model_len)
        return await self._answer(request, body, asked, CompletionResponse(asked))

    async def _body(self, request: Request) -> dict[str, Any]:
        body = parse_body(await request.body())
        body["model"] = body.get("model") or self.model
        if body["model"] != self.model:
            raise RefusedRequestError(
                f"The model `{body['model']}` does not exist. Valid aliases: {self.model}.",
                kind="NotFoundError",
                param="model",
                code=404,
            )
        return body

    async def _answer(
        self, request: Request, body: Mapping[str, Any], asked: GenerationRequest, response: WireResponse
    ) -> Response:
        call = EngineCall(len(self.calls) + 1, request.url.path, dict(request.headers), body)
        self.calls.append(call)
        fault = await _unless_client_leaves(request, self._on_call(call)) if self._on_call else None
        if isinstance(fault, Failure):
            raise RefusedRequestError(fault.message, kind="InternalServerError", code=fault.status)
        if asked.stream:
            return _EventStream(self._events(asked, response), cut_after=fault.after_frames if fault else None)
        whole = orjson.dumps(await _unless_client_leaves(request, self._complete(asked, response)))
        if fault:
            return _HalfResponse(whole, media_type="application/json")
        return Response(whole, media_type="application/json")

    async def _complete(self, asked: GenerationRequest, response: WireResponse) -> dict[str, Any]:
        choices = self._choices(asked)
        async for _ in self._generate(asked, choices):
            pass
        return response.body(choices)

    async def _events(self, asked: GenerationRequest, response: WireResponse) -> AsyncIterator[bytes]:
        choices = self._choices(asked)
        for chunk in response.first_chunks(choices):
            yield _event(chunk)
        async for choice, delta in self._generate(asked, choices):
            following = response.chunk(choice, delta)
            if following is not None:
                if not asked.include_usage and all(choice.finish_reason for choice in choices):
                    following["system_fingerprint"] = SYSTEM_FINGERPRINT
                yield _event(following)
        if asked.include_usage:
            yield _event(response.usage_chunk(choices))
        yield b"data: [DONE]\n\n"

    def _choices(self, asked: GenerationRequest) -> list[Choice]:
        prompts = [prompt for prompt in asked.prompts for _ in range(asked.n)]
        return [Choice(index, prompt, asked.max_tokens) for index, prompt in enumerate(prompts)]

    async def _generate(
        self, asked: GenerationRequest, choices: list[Choice]
    ) -> AsyncIterator[tuple[Choice, dict[str, Any]]]:
        """One token of each unfinished choice in turn, with what it adds to the message."""
        seed = random.getrandbits(64) if asked.seed is None else asked.seed
        samplers = [
            self.policy.sample(
                choice.prompt,
                max_tokens=asked.max_tokens,
                temperature=asked.temperature,
                seed=f"{seed} {choice.index % asked.n}",
                top=asked.logprobs or 0,
                forced=asked.forced,
                banned=asked.banned,
            )
            for choice in choices
        ]
        while not all(choice.finish_reason for choice in choices):
            for choice, sampler in zip(choices, samplers, strict=True):
                if choice.finish_reason is None:
                    yield choice, choice.append(next(sampler))
            await asyncio.sleep(self.seconds_per_token)

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        token_ids = chat_prompt(body, self.habits) if "messages" in body else encode(str(body.get("prompt", "")))
        texts = [token_text(token) for token in token_ids] if body.get("return_token_strs") else None
        return JSONResponse(
            {"count": len(token_ids), "max_model_len": self.max_model_len, "tokens": token_ids, "token_strs": texts}
        )

    async def _detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": prompt_text(await self._body(request))})

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "token-id-capture",
            "root": self.model,
            "parent": None,
            "max_model_len": self.max_model_len,
            "permission": [],
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def _health(self, request: Request) -> Response:
        return Response()


class _EventStream(StreamingResponse):
    """Server-sent events; with ``cut_after`` the connection breaks after so many of them."""

    def __init__(self, events: AsyncIterator[bytes], *, cut_after: int | None) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._cut_after = cut_after

    async def stream_response(self, send: Send) -> None:
        if self._cut_after is None:
            await super().stream_response(send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sent = 0
        async for event in self.body_iterator:
            if sent == self._cut_after:
                return  # the server closes a connection whose response was left unfinished
            await send({"type": "http.response.body", "body": event, "more_body": True})
            sent += 1


class _HalfResponse(Response):
    """A response whose connection breaks half-way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        half = bytes(self.body)[: len(self.body) // 2]
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": half, "more_body": True})


async def _unless_client_leaves(request: Request, work: Awaitable[_Result]) -> _Result:
    """Await ``work``, but give it up when the client hangs up, as engines do."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RefusedRequestError("client closed the request", code=499)
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


async def _detail(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedRequestError)
    return JSONResponse(error.body, error.status)
