"""The recorded requests of harnesses, and the chat completions that they are translated to.

``python tests/support/dialect_golden.py`` writes ``tests/data/dialects/chat`` again: a change of a prompt is then
seen as a difference. Tools, which are long and repeated, lie in a file of their own.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from token_id_capture.server.dialects.chat import ChatRequest, InlineSystem, TranslationOptions
from token_id_capture.server.dialects.paths import target_of
from token_id_capture.server.dialects.translate import read_request

FOLDER = Path(__file__).parents[1] / "data" / "dialects"
OPTIONS = TranslationOptions(inline_system=InlineSystem.KEEP)


@dataclass(frozen=True)
class Recorded:
    """One request: the harness and its scenario, the path behind the correlation prefix, and the body."""

    name: str
    path: str
    body: dict[str, Any]

    def translated(self, options: TranslationOptions = OPTIONS) -> ChatRequest:
        target = target_of(self.path)
        assert target is not None
        return read_request(target, self.body, options)


def recorded() -> list[Recorded]:
    lines = gzip.decompress((FOLDER / "requests.jsonl.gz").read_bytes()).splitlines()
    return [Recorded(**json.loads(line)) for line in lines]


def golden(request: Recorded) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is kept of a translation: the request without its tools, and the tools by their digest."""
    chat = request.translated()
    body = dict(chat.body)
    tools = {}
    if "tools" in body:
        digest = hashlib.sha256(json.dumps(body["tools"]).encode()).hexdigest()[:12]
        tools[digest] = body["tools"]
        body["tools"] = digest
    return {"left_out": chat.left_out, "chat": body}, tools


def write() -> Iterator[Path]:
    tools: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for request in recorded():
        found[request.name], own = golden(request)
        tools |= own
    for name, value in (("chat", found), ("tools", tools)):
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        yield path


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    key, *rest = path
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[key] = replaced(value[key], tuple(rest), other)
    return copied


if __name__ == "__main__":
    for path in write():
        sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")
