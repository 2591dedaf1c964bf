"""Prompt ids that the engine leaves out of its responses, from its own tokenizer endpoints."""

from __future__ import annotations

from starlette.types import Scope

from token_id_capture import reasons
from token_id_capture.server.engines.base import EngineAnswerError, TokenizesPrompts
from token_id_capture.server.http.exchange import Exchanges, asker
from token_id_capture.server.http.upstream import UpstreamError
from token_id_capture.server.wire.entries import NotCapturableError
from token_id_capture.server.wire.request import CallBody
from token_id_capture.server.wire.response import EngineResponse


async def add_prompt_ids(
    served: EngineResponse, engine: TokenizesPrompts, body: CallBody, exchanges: Exchanges, scope: Scope
) -> None:
    """Ask for the prompt of a call and give it to each choice that has none.

    The engine counted the prompt when it read it. Another count means that what was rendered now
    is not what it read.

    Raises:
        NotCapturableError: the engine does not tell the ids, or other ones than it read.
    """
    lacking = [choice.tokens for choice in served.choices if choice.tokens.prompt_ids is None]
    if not lacking:
        return

    try:
        ids = await engine.prompt_ids(body.endpoint, body.members, asker(exchanges, scope))
    except (EngineAnswerError, UpstreamError) as error:
        raise NotCapturableError(reasons.NO_TOKEN_IDS, f"no prompt token ids: {error}") from error
    if len(ids) != served.prompt_tokens:
        counted = "no count of" if served.prompt_tokens is None else served.prompt_tokens
        detail = f"{len(ids)} prompt token ids from the tokenizer, {counted} prompt tokens"
        raise NotCapturableError(reasons.TOKEN_COUNT_MISMATCH, detail)
    for tokens in lacking:
        tokens.prompt_ids = ids
