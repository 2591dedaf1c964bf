"""What the client sees of a captured response: the engine's bytes, less what it did not ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from token_id_capture.server.engines.base import PROVIDER_FIELDS, choices_of
from token_id_capture.server.text.json_splice import EVERY, Hidden, Splicer
from token_id_capture.server.text.sse import Event
from token_id_capture.server.wire.fast_parse import ResponseBody


class ClientView:
    """Hides what was added for the capture, in responses and in the events of a stream.

    ``hide_usage`` swallows the chunk that only tells the usage, where the client had not asked for it.
    """

    def __init__(self, hidden: tuple[Hidden, ...], *, hide_usage: bool) -> None:
        self._splicer = Splicer([*hidden, *_moved_aside(hidden)])
        paths = [rule.path for rule in hidden]
        self._hidden_extensions = {path for path in paths if len(path) == 2 and path[0] != EVERY}
        self._hidden_delta = {path[3] for path in paths if path[:3] == ("choices", "*", "delta")}
        # "index" names the choice and "delta" is looked into; neither says anything of its own.
        members = {path[2] for path in paths if path[:2] == ("choices", "*") and len(path) == 3}
        self._silent = {"index", "delta"} | members
        self._hide_usage = hide_usage

    def response(self, response: ResponseBody) -> bytes:
        """A complete response, or the data of one event, as the client sees it.

        Raises:
            ValueError: what is to be hidden cannot be found in it.
        """
        if response.parsed is None and self._splicer.may_hide(response.text):
            raise ValueError("it is not JSON, and names what is hidden")
        return response.text if response.parsed is None else response.visible(self._splicer)

    def text(self, text: bytes) -> bytes:
        """A partial response as the client sees it: empty if it may hold part of a hidden field."""
        return b"" if self._splicer.may_hide(text) else text

    def event(self, event: Event, data: ResponseBody) -> bytes:
        """One event of a stream as the client sees it; empty if there is nothing in it for the client.

        Raises:
            ValueError: what is to be hidden cannot be found in it.
        """
        if isinstance(data.parsed, dict) and self._leaves_out(data.parsed):
            return b""
        visible = self.response(data)
        return event.raw if visible is data.text else event.with_data(visible)

    def shape(self, rest: bytes, parsed: Mapping[str, Any]) -> bytes | None:
        """A chunk with marks in the place of some values, as the client sees it; None if it does not see it.

        Raises:
            ValueError: the text could not be followed.
        """
        return None if self._leaves_out(parsed) else self._splicer.hide(rest)

    def _leaves_out(self, chunk: Mapping[str, Any]) -> bool:
        return (self._hide_usage and is_usage_only(chunk)) or self._is_hidden(chunk) or self._is_extension(chunk)

    def _is_extension(self, chunk: Mapping[str, Any]) -> bool:
        """Whether the chunk has no choice, only an extension of which all is hidden: it would not have come."""
        if chunk.get("choices") != [] or chunk.get("usage") is not None:
            return False
        said = [(name, key) for name, _ in self._hidden_extensions for key in _said(chunk.get(name))]
        return bool(said) and self._hidden_extensions.issuperset(said)

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
            said.update(_said(delta))
        return bool(said) and said <= self._hidden_delta


@lru_cache(maxsize=256)
def client_view(hidden: tuple[Hidden, ...], *, hide_usage: bool) -> ClientView:
    """The view that all clients share who asked alike."""
    return ClientView(hidden, hide_usage=hide_usage)


def _said(holder: object) -> list[str]:
    """The keys of an object whose value says something."""
    return [key for key, value in holder.items() if value is not None] if isinstance(holder, Mapping) else []


def _moved_aside(hidden: tuple[Hidden, ...]) -> Iterator[Hidden]:
    """The same rules for where LiteLLM puts the members of a response, a choice or a message."""
    for rule in hidden:
        *holder, name = rule.path
        yield Hidden((*holder, PROVIDER_FIELDS, name), cut=True)
        if holder == ["choices", EVERY]:
            for inner in ("message", "delta"):
                yield Hidden((*holder, inner, PROVIDER_FIELDS, name), cut=True)


def is_usage_only(chunk: Mapping[str, Any]) -> bool:
    """Whether this is the chunk at the end of a stream that tells the usage and nothing else."""
    return chunk.get("choices") == [] and chunk.get("usage") is not None
