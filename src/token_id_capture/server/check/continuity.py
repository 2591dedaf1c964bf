"""Try whether an engine takes exact tokens in place of its own rendering of a chat."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
from starlette.types import Scope

from token_id_capture.protocols import offers
from token_id_capture.provenance import Policy
from token_id_capture.records import TokenEntry
from token_id_capture.server.check.in_memory import MemorySink, call_in_memory
from token_id_capture.server.engines.base import Engine, EngineAnswerError
from token_id_capture.server.engines.continuing import ContinuesPrefixes, ContinuesPrompts
from token_id_capture.server.gateway import Gateway
from token_id_capture.server.http.exchange import Exchanges, asker
from token_id_capture.server.http.upstream import UpstreamError
from token_id_capture.server.middleware import TokenCaptureMiddleware
from token_id_capture.server.settings import GatewaySettings
from token_id_capture.tokens import TokenIds

_CHAT: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4}
_NEWER_VLLM: Final = "vLLM takes them from release 0.27 on"


@dataclass(frozen=True)
class ContinuityResult:
    """The policies of ``--continuity`` that work; ``problem`` says why not all of them."""

    policies: tuple[Policy, ...]
    problem: str = ""


async def try_continuity(
    exchanges: Exchanges, engine: Engine, settings: GatewaySettings, model: str | None, *, seconds: float
) -> ContinuityResult:
    """Send chats with ids that the template would not give, and look at what the engine read."""
    trial = _Trial(exchanges, engine, settings, {} if model is None else {"model": model})
    try:
        async with asyncio.timeout(seconds):
            if offers(engine, ContinuesPrompts):
                return await trial.of_prompts(engine)
            if offers(engine, ContinuesPrefixes):
                return await trial.of_prefixes(engine)
            return ContinuityResult((), "this engine adapter takes no prompt as token ids")
    except TimeoutError:
        return ContinuityResult((), f"no answer in {seconds:g} s")
    except (EngineAnswerError, UpstreamError) as error:
        return ContinuityResult((), str(error))


class _Trial:
    def __init__(
        self, exchanges: Exchanges, engine: Engine, settings: GatewaySettings, named: Mapping[str, Any]
    ) -> None:
        self._exchanges = exchanges
        self._gateway = Gateway(exchanges, engine, settings)
        self._named = named

    async def of_prompts(self, engine: ContinuesPrompts) -> ContinuityResult:
        plain = await self._captured({})
        body = {**self._named, **_CHAT}
        ask = asker(self._exchanges, _scope())
        rendered = await engine.render(body, _CHAT["messages"], True, ask)
        if rendered.ids != plain.prompt_token_ids:
            return ContinuityResult((), "its tokenizer endpoint does not give the prompt that its chat endpoint read")
        # No template writes its last token twice, so an engine that ignores the ids reads another prompt.
        given = TokenIds.joined(plain.prompt_token_ids, plain.prompt_token_ids[-1:])
        told = await self._captured(engine.prompt_fields(given.tolist()))
        if told.prompt_token_ids != given:
            return ContinuityResult((), f"it ignored the token ids of a prompt ({_NEWER_VLLM})")
        try:
            await engine.text(body, given, ask)
        except (EngineAnswerError, UpstreamError) as error:
            return ContinuityResult((Policy.EXACT,), str(error))
        return ContinuityResult((Policy.TEMPLATE, Policy.EXACT))

    async def of_prefixes(self, engine: ContinuesPrefixes) -> ContinuityResult:
        plain = await self._captured({})
        prompt = TokenIds.joined(plain.prompt_token_ids[:1], plain.prompt_token_ids)
        known = TokenIds.joined(prompt, plain.generation_token_ids)
        said = {"role": "assistant", "content": plain.output_items[0].get("content") or ""}
        messages = [*_CHAT["messages"], said, {"role": "user", "content": "And bye."}]
        told = await self._captured({"messages": messages, **engine.prefix_fields(known.tolist())})
        if not told.prompt_token_ids.startswith(known):
            return ContinuityResult((), "it ignored the token ids with which a prompt was to begin")
        return ContinuityResult((Policy.EXACT,), "it does not show what its template writes")

    async def _captured(self, fields: Mapping[str, Any]) -> TokenEntry:
        """The call that a chat with these fields is captured as.

        Raises:
            EngineAnswerError: it is not captured.
        """
        sink = MemorySink()
        app = TokenCaptureMiddleware(self._gateway, sink=sink)
        body = orjson.dumps({**self._named, **_CHAT, **fields})
        await call_in_memory(app, "POST", "/v1/chat/completions", body)
        if not sink.entries:
            raise EngineAnswerError(next(iter([*sink.refusals, *sink.marks]), "a chat was not captured"))
        return sink.entries[0]


def _scope() -> Scope:
    return {"type": "http", "method": "POST", "headers": [], "query_string": b"", "root_path": ""}
