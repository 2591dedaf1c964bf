"""A whole response, read without parsing its long arrays one value after the other.

Nearly all of a response is three arrays: the prompt's ids, which grow with the rollout, the generated
ids, and an object for each log probability. Each is found by its key, cut out and read separately; of the
prompt only the part that the rollout's last sequence does not have yet. The short rest is parsed as usual,
with a mark in the place of each array::

    engine   {"id":"c1","prompt_token_ids":[1,2,3],"choices":[{"token_ids":[7,8],"logprobs":{"content":[{...
    cut out  [1,2,3]   [7,8]   [{"token":"a","logprob":-0.1,...},...]
    parsed   {"id":"c1","prompt_token_ids":"prompt_token_ids-5f1e...","choices":[{"token_ids":"token_ids-5f1e...",...
    client   {"id":"c1","prompt_token_ids":null,"choices":[{"token_ids":null,"logprobs":{"content":[{...

The mark says where in the parsed response an array belongs, and where in the text the client gets the array
back if it asked for it, or a null.

This guesses how engines write, and parsing proves each guess: inside a string every quotation mark
is escaped, so where an array that was cut out parses by itself, and the rest parses with a mark in
its place, the whole would have parsed to the same. Whatever does not fit is parsed as a whole. Two
things differ: a number that is too large for a double, and nesting too deep for the parser, make the
whole parse fail, and are passed over here in those fields of a log probability that nobody reads; and
in a text that nests too deeply to be walked through, these arrays are hidden too.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from token_id_capture.server.engines.base import PackedLogProbs
from token_id_capture.server.text.json_splice import Splicer
from token_id_capture.server.wire.prompt_cache import KnownTexts
from token_id_capture.tokens import LogProbs, TokenIds

_PROMPT: Final = b'"prompt_token_ids":['
_GENERATION: Final = b'"token_ids":['
_TOKENS: Final = b'"tokens":['
_LOG_PROBS: Final = b'"logprobs":{"content":[{'
_BEFORE_ENTRIES: Final = len(b'{"content":')
# Where the last one ends. In another field of an entry it would be too early, and found out.
_LOG_PROBS_END: Final = b'"top_logprobs":[]}]}'
_SPELLED_ID: Final = "token_id:"
_FIRST_ENTRY: Final = 4096
_SECRET: Final = secrets.token_hex(16)
# What no engine can have written, and stands in the place of an array that was cut out.
_MARKS: Final = {name: f"{name}-{_SECRET}" for name in ("prompt_token_ids", "token_ids", "logprobs", "tokens")}
_QUOTED_MARKS: Final = {name: f'"{mark}"'.encode() for name, mark in _MARKS.items()}


class _Entry(msgspec.Struct, gc=False):
    """What is needed of a log probability. An entry that names the id of its token is not taken: it
    has to be compared with the ids.
    """

    logprob: float
    # No value in JSON is of this type.
    id: msgspec.UnsetType = msgspec.UNSET
    token_id: msgspec.UnsetType = msgspec.UNSET


_decode_entries = msgspec.json.Decoder(list[_Entry]).decode
_read_value: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


@dataclass(slots=True)
class _Cut:
    """An array that was cut out: where it was, and what it says. In the rest its mark is in its place."""

    name: str
    start: int
    end: int
    value: Any


class ResponseBody:
    """A response: its ``text`` as it came, and what it says: ``parsed``, which is None if it is no JSON."""

    def __init__(self, text: bytes, parsed: Any, rest: bytes, cuts: list[_Cut]) -> None:
        self.parsed = parsed
        self.text = text
        self._rest = rest
        self._cuts = cuts

    @classmethod
    def parse(cls, text: bytes) -> ResponseBody:
        """Read a response into plain objects."""
        try:
            parsed = orjson.loads(text)
        except orjson.JSONDecodeError:
            # Engines in Python also write what only the standard library reads, such as NaN.
            try:
                parsed = json.loads(text.decode())
            except (ValueError, RecursionError):
                parsed = None
        return cls(text, parsed, text, [])

    def visible(self, splicer: Splicer) -> bytes:
        """The response with what ``splicer`` hides as null, and all else as the engine wrote it.

        Raises:
            ValueError: the text could not be followed.
        """
        hidden = splicer.values(self._rest, self.parsed) if self._cuts else None
        if hidden is not None:
            if not hidden:
                return self.text
            nulls = {cut.name: b"null" for cut in self._cuts if id(cut.value) in hidden}
            if len(nulls) == len(hidden):  # nothing but what was cut out
                return _with(self.text, self._cuts, nulls)
        visible = splicer.hide(self._rest)
        if visible is self._rest:
            return self.text
        for cut in self._cuts:
            visible = visible.replace(_QUOTED_MARKS[cut.name], self.text[cut.start : cut.end])
        return visible


class BodyReader:
    """Reads the responses of a rollout, whole or chunk by chunk; arrays may come out packed.

    Without ``known`` they never do, and all is parsed as usual.
    """

    def __init__(self, known: KnownTexts | None, rollout_id: str) -> None:
        self._known = known
        self._rollout_id = rollout_id

    @property
    def packed(self) -> bool:
        """Whether arrays may come out packed."""
        return self._known is not None

    def whole(self, text: bytes) -> ResponseBody:
        """Read a response; arrays in it may be ``TokenIds`` and ``PackedLogProbs``."""
        if self._known is None:
            return ResponseBody.parse(text)
        try:
            cuts = _log_probs(text)
            cuts.append(_generation(text, cuts[-1].end if cuts else 0))
            return self._cut(text, cuts, self._known)
        except (ValueError, StopIteration, RecursionError, msgspec.DecodeError):
            return ResponseBody.parse(text)

    def chunk(self, text: bytes) -> ResponseBody:
        """Read a chunk of a streamed response; of its arrays only the prompt's, which the first one has, is long."""
        if self._known is not None and _PROMPT in text:
            with contextlib.suppress(ValueError):
                return self._cut(text, [], self._known)
        return ResponseBody.parse(text)

    def _cut(self, text: bytes, cuts: list[_Cut], known: KnownTexts) -> ResponseBody:
        """Read the rest of a response and its prompt."""
        start, end = _array(text, _PROMPT, cuts[-1].end if cuts else 0)
        prompt = text[start:end]
        ids = known.read(self._rollout_id, prompt)
        cuts.append(_Cut("prompt_token_ids", start, end, ids))
        cuts.sort(key=lambda cut: cut.start)
        rest = _with(text, cuts, _QUOTED_MARKS)
        parsed = orjson.loads(rest)
        _put_back(parsed, {cut.name: cut.value for cut in cuts})
        known.remember(self._rollout_id, prompt, ids)
        return ResponseBody(text, parsed, rest, cuts)


def read_tokens(text: bytes, known: KnownTexts, rollout_id: str) -> tuple[Any, bytes]:
    """A tokenizer endpoint's answer, whose ``tokens`` may come out packed, and the text of that array.

    The text is empty where the answer was parsed as a whole.

    Raises:
        ValueError: it is no JSON.
    """
    with contextlib.suppress(ValueError):
        start, end = _array(text, _TOKENS, 0)
        parsed = orjson.loads(text[:start] + _QUOTED_MARKS["tokens"] + text[end:])
        if isinstance(parsed, dict) and parsed.get("tokens") == _MARKS["tokens"]:
            array = text[start:end]
            parsed["tokens"] = known.read(rollout_id, array)
            return parsed, array
    return orjson.loads(text), b""


def _array(text: bytes, key: bytes, position: int) -> tuple[int, int]:
    """Where the array of such a key starts and ends, the key's next one from ``position`` on if there is any."""
    found = text.find(key, position)
    start = (text.index(key) if found < 0 else found) + len(key) - 1
    return start, text.index(b"]", start) + 1


def _log_probs(text: bytes) -> list[_Cut]:
    """The log probabilities of a chat; none where the response has none in this shape."""
    found = text.find(_LOG_PROBS)
    if found < 0:
        return []
    start = text.index(b":", found) + 1
    end = text.index(_LOG_PROBS_END, start) + len(_LOG_PROBS_END)
    # Nothing but the entries: a second list of them would be the one that counts.
    entries = text[start + _BEFORE_ENTRIES : end - len(b"}")]
    log_probs = packed_log_probs(entries)
    # Tokens that spell ids have to be compared too; either all of them do, or none counts.
    first, _ = _read_value(entries[:_FIRST_ENTRY].decode("latin-1"), len("["))
    if str(first.get("token")).startswith(_SPELLED_ID):
        raise ValueError("the entries spell the ids of their tokens")
    return [_Cut("logprobs", start, end, PackedLogProbs(log_probs))]


def packed_log_probs(entries: bytes) -> LogProbs:
    """The log probabilities of a JSON array of a chat's entries, whose other fields are not looked at.

    Raises:
        ValueError: it is not such an array, or an entry names the id of its token.
    """
    if not entries.isascii():
        entries.decode()  # skipped bytes must be text too
    return LogProbs([entry.logprob for entry in _decode_entries(entries)])


def _generation(text: bytes, position: int) -> _Cut:
    start, end = _array(text, _GENERATION, position)
    ids = text[start:end]
    if b"e" in ids:
        raise ValueError("true and false are not ids, though Python treats them as integers")
    return _Cut("token_ids", start, end, TokenIds(orjson.loads(ids)))


def _with(text: bytes, cuts: list[_Cut], replacements: Mapping[str, bytes]) -> bytes:
    """``text`` with other texts in the places of some cuts."""
    pieces: list[bytes] = []
    done = 0
    for cut in cuts:
        if cut.name in replacements:
            pieces += (text[done : cut.start], replacements[cut.name])
            done = cut.end
    pieces.append(text[done:])
    return b"".join(pieces)


def _put_back(parsed: Any, values: dict[str, Any]) -> None:
    """Put the values where their marks are, which is in the response or in one of its choices.

    Raises:
        ValueError: a mark is somewhere else.
    """
    choices = parsed.get("choices") if isinstance(parsed, dict) else None
    for holder in (parsed, *(choices if isinstance(choices, list) else ())):
        for name in [*values] if isinstance(holder, dict) else ():
            if holder.get(name) == _MARKS[name]:
                holder[name] = values.pop(name)
    if values:
        raise ValueError("an array is not where it was looked for")
