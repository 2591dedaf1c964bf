"""What the client sees of a captured reply: the engine's bytes, less what it did not ask for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from token_id_capture.server.engines.base import choices_of
from token_id_capture.server.json_splice import Hidden, Splicer
from token_id_capture.server.sse import Event

_logger = logging.getLogger(__name__)


class ClientView:
    """Hides what was added for the capture, in replies and in the events of a stream.

    ``hide_usage`` swallows the chunk that only tells the usage, where the client had not asked for it.
    """

    def __init__(self, hidden: tuple[Hidden, ...], *, hide_usage: bool) -> None:
        self._splicer = Splicer(hidden)
        paths = [rule.path for rule in hidden]
        self._hidden_delta = {path[3] for path in paths if path[:3] == ("choices", "*", "delta")}
        # "index" names the choice and "delta" is looked into; neither says anything of its own.
        members = {path[2] for path in paths if path[:2] == ("choices", "*") and len(path) == 3}
        self._silent = {"index", "delta"} | members
        self._hide_usage = hide_usage

    def reply(self, body: bytes) -> bytes:
        """A complete reply, parsed before, as the client sees it."""
        try:
            return self._splicer.hide(body)
        except ValueError as error:
            # More than it asked for does a client no harm; a broken reply would.
            _logger.warning("a reply is passed on with the token fields in it: %s", error)
            return body

    def event(self, event: Event, chunk: Mapping[str, Any]) -> bytes:
        """One event of a stream as the client sees it; empty if there is nothing in it for the client."""
        if (self._hide_usage and is_usage_only(chunk)) or self._is_hidden(chunk):
            return b""
        data = event.data or b""
        visible = self.reply(data)
        return event.raw if visible is data else event.with_data(visible)

    def _is_hidden(self, chunk: Mapping[str, Any]) -> bool:
        """Whether the deltas say something, but only what is hidden. An engine that is told to leave
        reasoning out sends no such chunk."""
        if not self._hidden_delta:
            return False
        said: set[str] = set()
        for _, choice in choices_of(chunk):
            delta = choice.get("delta")
            beside = any(value is not None and key not in self._silent for key, value in choice.items())
            if beside or not isinstance(delta, Mapping):
                return False
            said.update(key for key, value in delta.items() if value is not None)
        return bool(said) and said <= self._hidden_delta


def is_usage_only(chunk: Mapping[str, Any]) -> bool:
    """Whether this is the chunk at the end of a stream that tells the usage and nothing else."""
    return chunk.get("choices") == [] and chunk.get("usage") is not None
