"""Whether an engine's chat template takes a system message behind others, found out by asking once."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import orjson
from starlette.types import Scope

from token_id_capture.server.dialects.chat import InlineSystem
from token_id_capture.server.http.exchange import Exchanges
from token_id_capture.server.http.upstream import UpstreamError

_logger = logging.getLogger(__name__)

_MESSAGES: Final = [
    {"role": "user", "content": "Hello."},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello again."},
]


class InlineSystemProbe:
    """Asks the engine for one token after such a message, in no rollout, and remembers the answer."""

    def __init__(self, upstream: Exchanges) -> None:
        self._upstream = upstream
        self._lock = asyncio.Lock()
        self._known: dict[str, InlineSystem] = {}

    async def mode(self, scope: Scope, model: str) -> InlineSystem:
        """How to send such messages to ``model``. ``scope`` is the request that asks, for its key.

        An engine that cannot be asked now is not remembered, and gets the message in its place.
        """
        async with self._lock:
            if model not in self._known:
                status = await self._ask(scope, model)
                if status is None or (status != 400 and status >= 300):
                    return InlineSystem.KEEP
                self._known[model] = InlineSystem.USER if status == 400 else InlineSystem.KEEP
                _logger.info("system messages behind others: %s (HTTP %d)", self._known[model], status)
        return self._known[model]

    async def _ask(self, scope: Scope, model: str) -> int | None:
        path = "/v1/chat/completions"
        headers = [(name, value) for name, value in scope["headers"] if name.lower() == b"authorization"]
        asking = {
            **scope,
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *headers],
        }
        body = orjson.dumps({"model": model, "messages": _MESSAGES, "max_tokens": 1})
        try:
            async with self._upstream.open(asking, body, plain=True) as response:
                await response.read()
                return response.status
        except UpstreamError as error:
            _logger.warning("the engine could not be asked about system messages: %s", error)
            return None
