"""The layer between parsing a chat and sending it: find the call it continues, and decide on its prompt.

Every doubt ends in the template's own prompt with a reason. No call fails, and none is sent twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import orjson
from starlette.types import Scope

from token_id_capture import reasons
from token_id_capture.errors import ConfigurationError
from token_id_capture.protocols import RemembersHistories, offers
from token_id_capture.provenance import Continuity, KnownCall, Mode, Policy
from token_id_capture.recent import Newest
from token_id_capture.server.continuity.candidates import NotContinuedError, continued_call, known_calls
from token_id_capture.server.continuity.canonical import (
    Answer,
    History,
    NotTextError,
    UnreadableHistoryError,
)
from token_id_capture.server.continuity.known_histories import KnownHistories
from token_id_capture.server.continuity.plan import Plan
from token_id_capture.server.continuity.tail import RestatedAnswer, TailUnknownError, continue_answer
from token_id_capture.server.continuity.template import Render, TemplateMemory
from token_id_capture.server.defaults import ENGINE
from token_id_capture.server.engines.base import Ask, Engine, EngineAnswerError
from token_id_capture.server.engines.continuing import Continues, ContinuesPrefixes, ContinuesPrompts
from token_id_capture.server.http.exchange import Exchanges, asker
from token_id_capture.server.http.metrics import GatewayMetrics
from token_id_capture.server.http.upstream import UpstreamError
from token_id_capture.server.wire.fast_parse import read_tokens
from token_id_capture.server.wire.prompt_cache import KnownTexts
from token_id_capture.tokens import TokenIds

_logger = logging.getLogger(__name__)

_LONGEST: Final = 5.0
"""Seconds until a call continues with the template's prompt."""
_SCOPES_REMEMBERED: Final = 4096


def require_continuity(engine: Engine, policy: Policy, name: str) -> Continues | None:
    """The engine as one that can do what the policy needs; None with ``off``. ``name`` is what it is called.

    Raises:
        ConfigurationError: it cannot.
    """
    if policy is Policy.OFF:
        return None
    if offers(engine, ContinuesPrompts):
        return engine
    if not offers(engine, ContinuesPrefixes):
        which = "the engine is not known" if name == ENGINE else f"engine {name!r} takes no prompt as token ids"
        raise ConfigurationError(
            f"--continuity cannot be used here: {which}. Use it with --engine vllm, sglang or message, or leave it out"
        )
    if policy is Policy.TEMPLATE:
        raise ConfigurationError(
            f"--continuity template cannot be used with engine {name!r}, which does not show what its template writes: "
            "use exact"
        )
    return engine


def continuer_for(
    engine: Engine,
    policy: Policy,
    sink: object,
    exchanges: Exchanges,
    metrics: GatewayMetrics,
    *,
    name: str,
) -> Continuer | None:
    """The layer for this engine and sink; None with the policy ``off``. ``name`` is what the engine is called.

    Raises:
        ConfigurationError: the engine or the sink cannot do it.
    """
    adapter = require_continuity(engine, policy, name)
    if adapter is None:
        return None
    if not offers(sink, RemembersHistories):
        raise ConfigurationError(
            f"--continuity cannot be used with {type(sink).__name__}, which does not find the calls that a request "
            "continues: record in a TokenCaptureStore"
        )
    return Continuer(adapter, policy, sink, exchanges, metrics)


@dataclass(frozen=True, slots=True)
class _Request:
    """A chat whose call to continue is known, and what its prompt has to begin with."""

    body: Mapping[str, Any]
    history: History
    answer: Answer
    call: KnownCall
    known: TokenIds
    answers: _Answers

    @property
    def ask(self) -> Ask:
        """Asks the engine."""
        return self.answers.ask


class _Answers:
    """What the engine's tokenizer endpoint answers about one call, read with what is known of the rollout's prompts.

    Of a conversation's renderings each begins as the last one did, so only the new part is parsed.
    """

    def __init__(self, exchanges: Exchanges, scope: Scope, rollout_id: str, texts: KnownTexts) -> None:
        self.ask = asker(exchanges, scope, self._read)
        self.rollout_id = rollout_id
        self._texts = texts
        self._longest = b"", TokenIds()

    def _read(self, answer: bytes) -> Any:
        parsed, text = read_tokens(answer, self._texts, self.rollout_id)
        if len(text) > len(self._longest[0]):
            self._longest = text, parsed["tokens"]
        return parsed

    def remember(self) -> None:
        """Keep the longest, which is the request rendered whole, in place of what it continues."""
        self._texts.remember(self.rollout_id, *self._longest)


class Continuer:
    """Decides on the prompts of one gateway's calls; see ``continuer_for``. The gateway keeps in ``prompts`` what
    engines read."""

    def __init__(
        self,
        engine: Continues,
        policy: Policy,
        memory: RemembersHistories,
        exchanges: Exchanges,
        metrics: GatewayMetrics,
    ) -> None:
        self._engine = engine
        self._renderer = engine if offers(engine, ContinuesPrompts) else None
        self._policy = policy
        self._memory = memory
        self._exchanges = exchanges
        self._metrics = metrics
        self.prompts = KnownTexts()
        self._renderings = KnownTexts()
        self._histories = KnownHistories()
        self._templates = TemplateMemory()
        self._ignored = False
        # By the start of a chain: whether the tokenizer endpoint gives the prompt that the chat endpoint read.
        self._renders_alike: Newest[bytes, bool] = Newest(_SCOPES_REMEMBERED)

    async def plan(self, body: Mapping[str, Any], rollout_id: str, scope: Scope) -> Plan:
        """What to send for the chat ``body``, whose ASGI scope is ``scope``. Never raises an ``Exception``."""
        with self._metrics.continuity_seconds.time():
            plan = await self._without_doubt(body, rollout_id, scope)
        return replace(plan, count=self._count)

    async def _without_doubt(self, body: Mapping[str, Any], rollout_id: str, scope: Scope) -> Plan:
        history: History | None = None
        try:
            async with asyncio.timeout(_LONGEST):
                history = self._readable(body, rollout_id)
                return await self._decided(body, history, rollout_id, scope)
        except (NotContinuedError, TailUnknownError) as doubt:
            reason = doubt.reason
        except (EngineAnswerError, UpstreamError, TimeoutError) as error:
            _logger.info("the messages of a call of rollout %r were not rendered: %s", rollout_id, error)
            reason = reasons.RENDER_FAILED
        except Exception:
            _logger.exception("continuity failed for a call of rollout %r", rollout_id)
            reason = reasons.CONTINUITY_FAILED
        return Plan(Continuity(self._policy, Mode.PLAIN, reason), history)

    def _count(self, made: Continuity) -> None:
        self._metrics.count_continuity(made.outcome)

    def _readable(self, body: Mapping[str, Any], rollout_id: str) -> History:
        """The history of a request, if an answer to it can be recognised later."""
        if self._engine.prompt_field_of(body) is not None:
            raise NotContinuedError(reasons.PROMPT_FIELD)
        try:
            history = self._histories.read(rollout_id, body)
        except NotTextError as error:
            raise NotContinuedError(reasons.MEDIA) from error
        except UnreadableHistoryError as error:
            raise NotContinuedError(reasons.UNKNOWN_HISTORY) from error
        if history.ends_with_answer:
            raise NotContinuedError(reasons.ENDS_WITH_ANSWER)
        return history

    async def _decided(self, body: Mapping[str, Any], history: History, rollout_id: str, scope: Scope) -> Plan:
        if not history.answers:
            raise NotContinuedError(reasons.FIRST)
        if self._ignored:
            raise NotContinuedError(reasons.ENGINE_IGNORED_IDS)
        answer, call = continued_call(history, await known_calls(self._memory, rollout_id, history))
        known = await self._memory.sequence_of(rollout_id, call.model_call_id)
        if not known:
            raise NotContinuedError(reasons.UNKNOWN_HISTORY)
        answers = _Answers(self._exchanges, scope, rollout_id, self._renderings)
        request = _Request(body, history, answer, call, known, answers)
        if self._renderer is not None:
            return await self._spliced(request, self._renderer)
        return self._begun_with(request, cast(ContinuesPrefixes, self._engine))

    def _begun_with(self, request: _Request, engine: ContinuesPrefixes) -> Plan:
        """The engine itself puts the rest behind the known tokens."""
        made = Continuity(self._policy, Mode.SPLICED, "", request.call.model_call_id, len(request.known))
        fields = engine.prefix_fields(self._json(request, request.known))
        return Plan(made, request.history, fields, request.known, distrust=self._distrust)

    async def _spliced(self, request: _Request, engine: ContinuesPrompts) -> Plan:
        limits: list[int] = []

        async def render(messages: Sequence[Mapping[str, Any]], generation: bool) -> TokenIds:
            rendered = await engine.render(request.body, messages, generation, request.ask)
            limits.extend(() if rendered.limit is None else (rendered.limit,))
            return rendered.ids

        scope, known = request.history.start, request.known
        messages: Sequence[Mapping[str, Any]] = request.body["messages"]
        restated = RestatedAnswer(messages, request.answer.position, known, request.call.link.ended)
        found, _ = await asyncio.gather(
            continue_answer(restated, scope, render, self._templates),
            self._compare_once(request, render),
        )
        request.answers.remember()
        if not self._renders_alike.get(scope, True):
            raise NotContinuedError(reasons.RENDER_DIFFERS)
        whole = found.whole
        if found.tail is None:
            clean = self._made(Mode.CLEAN, request, len(whole) - len(known), None)
            return Plan(clean, request.history, {}, whole, whole=True, distrust=lambda _: self._differs(scope))
        prompt = TokenIds.joined(known, found.tail)
        if self._policy is Policy.TEMPLATE and not await self._reads_the_same(request, engine, prompt, whole):
            raise NotContinuedError(reasons.TEXT_DIFFERS)
        if limits and len(prompt) >= min(limits) > len(whole):
            raise NotContinuedError(reasons.NO_ROOM)
        made = self._made(Mode.SPLICED, request, len(found.tail), known.common_prefix_length(whole))
        fields = engine.prompt_fields(self._json(request, prompt))
        return Plan(made, request.history, fields, prompt, whole=True, distrust=self._distrust)

    def _json(self, request: _Request, ids: TokenIds) -> orjson.Fragment:
        return orjson.Fragment(self.prompts.write(request.answers.rollout_id, ids))

    async def _reads_the_same(
        self, request: _Request, engine: ContinuesPrompts, prompt: TokenIds, whole: TokenIds
    ) -> bool:
        texts = (engine.text(request.body, ids, request.ask) for ids in (prompt, whole))
        spliced, rendered = await asyncio.gather(*texts)
        return spliced == rendered

    async def _compare_once(self, request: _Request, render: Render) -> None:
        """Whether a prompt that the engine read is the one that it renders, once for each set of tools.

        Only the first prompt of a conversation was surely made by the template alone.
        """
        scope, position = request.history.start, request.answer.position
        earlier: Sequence[Mapping[str, Any]] = request.body["messages"][:position]
        if request.history.answers[0].position != position or self._renders_alike.get(scope, False):
            return
        if all(isinstance(message.get("content"), str) for message in earlier):
            rendered = await render(earlier, True)
            self._renders_alike[scope] = rendered == request.known[: request.call.prompt_length]

    def _differs(self, scope: bytes) -> None:
        self._renders_alike[scope] = False

    def _made(self, mode: Mode, request: _Request, added: int, diverges_at: int | None) -> Continuity:
        return Continuity(self._policy, mode, "", request.call.model_call_id, len(request.known), added, diverges_at)

    def _distrust(self, reason: str) -> None:
        """The engine read another prompt than it was sent."""
        if not self._ignored:
            self._ignored = True
            _logger.warning(
                "continuity is off from now on: the engine read another prompt than the one that was sent (%s). vLLM "
                "takes a chat's prompt as token ids from release 0.27 on.",
                reason,
            )
