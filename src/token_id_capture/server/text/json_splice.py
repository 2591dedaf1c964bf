"""Edit single values inside JSON text and leave every other byte as it is.

A client must see the engine's own bytes, and an engine the client's: parsing and serialising again
would change spacing, number formats and escapes. So the text is walked to the places that matter,
by a scanner that knows strings and nesting, and only there it is cut. Values on the way are skipped
with the scanner of the standard library, which runs in C.

The text must be JSON that was parsed before. What this walk still cannot follow raises ``ValueError``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from json.decoder import WHITESPACE, scanstring  # type: ignore[attr-defined]
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

EVERY: Final = "*"
"""A step of a path: each element of an array."""

_skip: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]
# An array of numbers, such as thousands of token ids, is skipped without making a number of each.
_NUMBERS = re.compile(r"\[[-+.0-9eE, \t\r\n]*+\]")
_KEY = re.compile(r'"([^"\\]*)"[ \t\r\n]*:[ \t\r\n]*')
_SEPARATOR = re.compile(r"[ \t\r\n]*([,}])[ \t\r\n]*")

_Edit: TypeAlias = tuple[int, int, str]


class Hidden(NamedTuple):
    """A value to hide: keys (and ``EVERY``) from the document's root, and how.

    ``cut`` removes the key as well; else the value becomes the JSON text ``instead``.
    """

    path: tuple[str, ...]
    cut: bool = False
    instead: str = "null"

    @classmethod
    @lru_cache(maxsize=1024)
    def at(cls, dotted: str, *, cut: bool = False, instead: str = "null") -> Hidden:
        """Read a path written as ``choices.*.token_ids``."""
        return cls(tuple(dotted.split(".")), cut, instead)


class Splicer:
    """Hides a fixed set of values, in as many documents as come."""

    def __init__(self, hidden: Iterable[Hidden]) -> None:
        self._root = _Node()
        for rule in hidden:
            self._root.add(rule)
        self._names = tuple({name.encode() for name in self._root.names(leaves_only=True)})
        on_the_way = {name.encode() for name in self._root.names()}
        self._quoted = re.compile(b'"(?:%b)"' % b"|".join(map(re.escape, sorted(on_the_way))))

    def may_hide(self, text: bytes) -> bool:
        """Whether the name of something hidden may be in ``text``, which need not be JSON."""
        return bool(self._names) and (b"\\u" in text or b"\0" in text or any(name in text for name in self._names))

    def hide(self, document: bytes) -> bytes:
        """``document`` with the values hidden; the same object if there is nothing to hide.

        Raises:
            ValueError: the document could not be followed.
        """
        if not self.may_hide(document):
            return document
        text = document.decode()
        edits: list[_Edit] = []
        _follow(text, _blank(text, 0), self._root, edits)
        return _applied(text, edits).encode() if edits else document

    def values(self, document: bytes, parsed: Any) -> set[int] | None:
        """The ids of the objects in ``parsed`` that ``hide`` would hide of ``document``, from which it was parsed.

        None where only a walk could tell: a member that comes twice, also one on the way to what is
        hidden, or is spelled with escapes, is not seen any more once it is parsed.
        """
        keys = self._quoted.findall(document)
        if len(keys) > len(set(keys)) or b"\\u" in document:
            return None
        found: set[int] = set()
        self._root.collect(parsed, found)
        return found


def set_members(text: str, members: Mapping[str, Any]) -> str:
    """The JSON object ``text`` with these top-level members: replaced where they are, else appended.

    Raises:
        ValueError: ``text`` is no JSON object.
    """
    missing = dict(members)
    edits: list[_Edit] = []
    try:
        spans, close = _members(text, _blank(text, 0), {}, edits)
        for key, _, start, end in spans:
            if key in members:
                edits.append((start, end, _dumped(members[key])))
                missing.pop(key, None)
    except (IndexError, StopIteration, RecursionError) as error:
        raise ValueError(f"cannot follow this JSON object ({type(error).__name__})") from error
    if missing:
        added = ",".join(f"{_dumped(key)}:{_dumped(value)}" for key, value in missing.items())
        edits.append((close, close, f",{added}" if spans else added))
    return _applied(text, edits)


class _Node:
    """The hidden paths as a tree; ``rule`` is set where one of them ends, ``cuts`` above one that cuts."""

    __slots__ = ("cuts", "element", "members", "rule")

    def __init__(self) -> None:
        self.members: dict[str, _Node] = {}
        self.element: _Node | None = None
        self.rule: Hidden | None = None
        self.cuts = False

    def add(self, rule: Hidden) -> None:
        node = parent = self
        for step in rule.path:
            parent = node
            if step == EVERY:
                node.element = node.element or _Node()
                node = node.element
            else:
                node = node.members.setdefault(step, _Node())
        node.rule = rule
        parent.cuts |= rule.cut

    def collect(self, value: Any, found: set[int]) -> None:
        """Add the ids of what the rules hide below ``value``, except nulls that stay as they are."""
        if isinstance(value, dict):
            for name, child in self.members.items():
                if name not in value:
                    continue
                member = value[name]
                if child.rule is None:
                    child.collect(member, found)
                elif member is not None or child.rule.cut:
                    found.add(id(member))
        elif isinstance(value, list) and self.element is not None:
            for item in value:
                self.element.collect(item, found)

    def names(self, *, leaves_only: bool = False) -> Iterable[str]:
        for name, child in self.members.items():
            if child.rule is not None or not leaves_only:
                yield name
            yield from child.names(leaves_only=leaves_only)
        if self.element is not None:
            yield from self.element.names(leaves_only=leaves_only)


def _follow(text: str, start: int, node: _Node, edits: list[_Edit]) -> None:
    """Collect the edits below one value. Raises ``ValueError`` where the text cannot be followed."""
    try:
        _value(text, start, node, edits)
    except (IndexError, StopIteration, RecursionError) as error:
        raise ValueError(f"cannot follow this JSON text ({type(error).__name__})") from error


def _value(text: str, start: int, node: _Node, edits: list[_Edit]) -> int:
    """Walk one value, collect its edits, and return where it ends."""
    opening = text[start]
    if opening == "{":
        spans, close = _members(text, start, node.members, edits)
        if node.cuts:
            edits.extend(_cuts(spans, node.members))
        return close + 1
    if opening != "[" or node.element is None:
        return _end(text, start)
    index = _blank(text, start + 1)
    if text[index] == "]":
        return index + 1
    while True:
        index = _blank(text, _value(text, index, node.element, edits))
        if text[index] == "]":
            return index + 1
        index = _blank(text, _expect(text, index, ","))


_Span: TypeAlias = tuple[str, int, int, int]


def _members(text: str, start: int, nodes: Mapping[str, _Node], edits: list[_Edit]) -> tuple[list[_Span], int]:
    """The members of the object at ``start`` as (key, where the key starts, where its value starts and ends),
    and where the closing brace is. What ``nodes`` null is collected on the way; others are skipped."""
    spans: list[_Span] = []
    index = _blank(text, _expect(text, start, "{"))
    if text[index] == "}":
        return spans, index
    while True:
        key, value = _key(text, index)
        child = nodes.get(key)
        if child is not None and child.rule is None:
            end = _value(text, value, child, edits)
        else:
            end = _end(text, value)
            rule = None if child is None else child.rule
            if rule is not None and not rule.cut and text[value:end] not in ("null", rule.instead):
                edits.append((value, end, rule.instead))
        spans.append((key, index, value, end))
        separator = _SEPARATOR.match(text, end)
        if separator is None:
            raise ValueError(f"expected a comma or a brace at position {end}")
        if separator[1] == "}":
            return spans, separator.start(1)
        index = separator.end()


def _key(text: str, start: int) -> tuple[str, int]:
    """The key at ``start``, and where its value starts."""
    plain = _KEY.match(text, start)
    if plain is not None:
        return plain[1], plain.end()
    key, index = scanstring(text, _expect(text, start, '"'), False)
    return key, _blank(text, _expect(text, _blank(text, index), ":"))


def _cuts(spans: list[_Span], nodes: Mapping[str, _Node]) -> Iterable[_Edit]:
    """Remove members together with one comma each, so that what stays is JSON."""
    rules = [nodes[key].rule if key in nodes else None for key, *_ in spans]
    cut = [rule is not None and rule.cut for rule in rules]
    last_kept = max((index for index, gone in enumerate(cut) if not gone), default=-1)
    for index in range(last_kept):
        if cut[index]:
            yield spans[index][1], spans[index + 1][1], ""
    if last_kept + 1 < len(spans):
        start = spans[last_kept][3] if last_kept >= 0 else spans[0][1]
        yield start, spans[-1][3], ""


def _end(text: str, start: int) -> int:
    if text[start] == "[" and (numbers := _NUMBERS.match(text, start)):
        return numbers.end()
    return _skip(text, start)[1]


def _blank(text: str, index: int) -> int:
    """The first position from ``index`` on that is not whitespace."""
    end: int = WHITESPACE.match(text, index).end()
    return end


def _expect(text: str, index: int, character: str) -> int:
    if text[index] != character:
        raise ValueError(f"expected {character!r} at position {index}, not {text[index]!r}")
    return index + 1


def _applied(text: str, edits: list[_Edit]) -> str:
    pieces: list[str] = []
    done = 0
    for start, end, replacement in sorted(edits):
        pieces += (text[done:start], replacement)
        done = end
    pieces.append(text[done:])
    return "".join(pieces)


def _dumped(value: Any) -> str:
    return orjson.dumps(value).decode()
