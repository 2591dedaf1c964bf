"""Try an engine as agents will use it, and say what of it can be captured.

The requests go through the real gateway, with a sink in memory: what it says here is what it will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import quote

import orjson

from token_id_capture.reasons import split_reason
from token_id_capture.server.check.advice import advice
from token_id_capture.server.check.continuity import ContinuityResult, try_continuity
from token_id_capture.server.check.in_memory import MemorySink, call_in_memory
from token_id_capture.server.defaults import ENGINE, Streaming
from token_id_capture.server.engines import make_engine
from token_id_capture.server.gateway import Gateway
from token_id_capture.server.http.exchange import Exchanges
from token_id_capture.server.http.limits import BodyBudget
from token_id_capture.server.middleware import TokenCaptureMiddleware
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.server.translation.inline_system import InlineSystemProbe
from token_id_capture.server.translation.layer import DialectTranslation
from token_id_capture.server.upstreams.detect import FoundEngine, find_engine
from token_id_capture.server.wire.entries import is_all_zero

Outcome: TypeAlias = Literal["captured", "not_captured", "refused", "failed"]

_CHAT: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4}
_TOOL: Final = {"name": "get_time", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
_WITH_TOOLS: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "What time is it? Call get_time."}],
    "tools": [{"type": "function", "function": _TOOL}],
    "max_tokens": 16,
}
_STREAM: Final = {"stream": True, "stream_options": {"include_usage": True}}
_CHATS, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_ALL_ZERO: Final = "every log probability is exactly 0"
_ALL_ZERO_ADVICE: Final = (
    "upgrade the engine, or turn speculative decoding off; greedy sampling under processed_logprobs does this too"
)

MODES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": (_CHATS, _CHAT),
    "chat, streamed": (_CHATS, {**_CHAT, **_STREAM}),
    "chat with tools, streamed": (_CHATS, {**_WITH_TOOLS, **_STREAM}),
    "completion": (_COMPLETIONS, {"prompt": "Hi", "max_tokens": 4}),
    "completion, streamed": (_COMPLETIONS, {"prompt": "Hi", "max_tokens": 4, **_STREAM}),
    "Messages, streamed": ("/v1/messages", {**_CHAT, "stream": True}),
    "Responses, streamed": ("/v1/responses", {"input": "Say hi.", "max_output_tokens": 4, "stream": True}),
    "Gemini, streamed": (
        "/v1beta/models/{model}:streamGenerateContent",
        {"contents": [{"parts": [{"text": "Say hi."}]}], "generationConfig": {"maxOutputTokens": 4}},
    ),
}
"""What is tried: the path, in which ``{model}`` stands for the model, and the request without the model."""


@dataclass(frozen=True)
class ModeResult:
    """What became of one mode. ``refused`` is the engine's no, ``failed`` that it did not answer as it should.

    ``tokens`` were generated and captured. ``reason`` is one of ``reasons`` where they were not,
    ``advice`` what to change then.
    """

    mode: str
    outcome: Outcome
    tokens: int = 0
    reason: str = ""
    detail: str = ""
    advice: str = ""


@dataclass(frozen=True)
class CheckResult:
    """What was found out; ``engine`` is the adapter that was used, ``streaming`` how streams must be asked for.

    ``continuity`` is None if it was not tried.
    """

    found: FoundEngine
    engine: str
    streaming: Streaming
    modes: tuple[ModeResult, ...]
    continuity: ContinuityResult | None = None

    @property
    def captured(self) -> int:
        """How many modes are captured."""
        return sum(mode.outcome == "captured" for mode in self.modes)

    @property
    def doubtful(self) -> list[ModeResult]:
        """The modes that are captured, though what is captured cannot be the truth."""
        return [mode for mode in self.modes if mode.outcome == "captured" and mode.detail]

    @property
    def uncaptured(self) -> list[ModeResult]:
        """The modes in which the engine answers, or should, and the answer is not captured."""
        return [mode for mode in self.modes if mode.outcome in ("not_captured", "failed")]


async def check_engine(
    exchanges: Exchanges,
    engine: str = ENGINE,
    settings: GatewaySettings | None = None,
    *,
    seconds: float = 120.0,
    continuity: bool = True,
) -> CheckResult:
    """Ask the engine who it is, and try each of ``MODES``; each may take ``seconds``.

    ``continuity`` tries that too, if chats are captured. Where the streams of a chat are not captured and
    whole responses are, ``streaming`` is ``never``.

    Raises:
        ConfigurationError: there is no such engine.
    """
    settings = settings or GatewaySettings()
    found = await find_engine(exchanges)
    name = found.engine or ENGINE if engine == ENGINE else engine
    check = _Check(exchanges, name, found.model, seconds)
    make_engine(name)
    if not found.reached:
        return CheckResult(found, name, settings.streaming, ())
    results = {mode: await check.tried(mode, settings) for mode in MODES}
    tried: ContinuityResult | None = None
    if continuity and results["chat"].outcome == "captured":
        tried = await try_continuity(exchanges, make_engine(name), settings, found.model, seconds=seconds)
    if settings.streaming == "auto" and _only_streams_fail(results):
        whole = settings.model_copy(update={"streaming": "never"})
        again = {mode: await check.tried(mode, whole) for mode in MODES if "streamed" in mode}
        if all(result.outcome == "captured" for mode, result in again.items() if results[mode].outcome != "refused"):
            return CheckResult(found, name, "never", tuple({**results, **again}.values()), tried)
    return CheckResult(found, name, settings.streaming, tuple(results.values()), tried)


def _only_streams_fail(results: Mapping[str, ModeResult]) -> bool:
    lost = [mode for mode, result in results.items() if result.outcome == "not_captured"]
    return bool(lost) and all("streamed" in mode for mode in lost)


class _Check:
    def __init__(self, exchanges: Exchanges, engine: str, model: str | None, seconds: float) -> None:
        self._exchanges = exchanges
        self._engine = engine
        self._model = {} if model is None else {"model": model}
        self._seconds = seconds

    async def tried(self, mode: str, settings: GatewaySettings) -> ModeResult:
        """Make the call of one mode."""
        path, request = MODES[mode]
        sink = MemorySink()
        gateway = Gateway(self._exchanges, make_engine(self._engine), settings)
        budget = BodyBudget(settings.body_bytes_in_flight)
        translated = DialectTranslation(gateway, settings, InlineSystemProbe(self._exchanges), budget=budget)
        app = TokenCaptureMiddleware(translated, sink=sink)
        path = path.format(model=quote(self._model.get("model", "model"), safe=""))
        try:
            async with asyncio.timeout(self._seconds):
                await call_in_memory(app, "POST", path, orjson.dumps({**self._model, **request}))
        except TimeoutError:
            return ModeResult(mode, "failed", detail=f"no answer in {self._seconds:g} s")
        if sink.entries:
            tokens = sum(len(entry.generation_token_ids) for entry in sink.entries)
            if all(is_all_zero(entry.generation_log_probs) for entry in sink.entries):
                return ModeResult(mode, "captured", tokens, detail=_ALL_ZERO, advice=_ALL_ZERO_ADVICE)
            return ModeResult(mode, "captured", tokens)
        if sink.refusals:
            detail = sink.refusals[0]
            return ModeResult(mode, "refused", detail=detail, advice=advice(self._engine, mode, "", detail))
        reason, detail = split_reason(sink.marks[0]) if sink.marks else ("", "no outcome")
        outcome: Outcome = "failed" if reason in ("unknown_outcome", "lost_stream", "") else "not_captured"
        return ModeResult(mode, outcome, 0, reason, detail, advice(self._engine, mode, reason, detail))
