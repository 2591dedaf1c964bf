"""The token ids of recorded Messages requests, as vLLM's own ``/v1/messages`` prompts with them.

``python tests/support/dialect_ids.py TEMPLATE URL`` asks a vLLM server that has the small model of ``tests/data/model``
and that chat template, and writes them to ``tests/data/dialects``. The README of that folder has the command of the
server. Our translation is rendered by the same server too, and nothing is written unless both are equal.
"""

from __future__ import annotations

import json
import lzma
import sys
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from support.dialect_golden import FOLDER, Recorded, recorded
from token_id_capture.server.dialects.chat import Dialect
from token_id_capture.server.dialects.paths import target_of

MODEL = "policy"


def recorded_messages() -> list[Recorded]:
    """The requests of Messages that were recorded."""
    found = ((request, target_of(request.path)) for request in recorded())
    return [request for request, target in found if target is not None and target.dialect is Dialect.MESSAGES]


def kept_ids(template: str) -> dict[str, list[int]]:
    """The ids that vLLM gave each request under a template, by the request's name."""
    kept: dict[str, list[int]] = json.loads(lzma.decompress((FOLDER / f"ids-{template}.json.xz").read_bytes()))
    return kept


def main(template: str, url: str) -> int:
    """Ask the server about each request."""
    found: dict[str, list[int]] = {}
    different: list[str] = []
    for request in recorded_messages():
        own = rendered(f"{url}/v1/messages/render", {**request.body, "model": MODEL})
        ours = rendered(f"{url}/v1/chat/completions/render", {**request.translated().body, "model": MODEL})
        found[request.name] = own
        if own != ours:
            different.append(request.name)
    sys.stdout.write(f"{len(found) - len(different)} of {len(found)} equal; others: {different}\n")
    if not different:
        (FOLDER / f"ids-{template}.json.xz").write_bytes(lzma.compress(json.dumps(found).encode()))
    return 1 if different else 0


def rendered(url: str, body: dict[str, Any]) -> list[int]:
    """The ids of a prompt."""
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request) as response:
            ids: list[int] = json.load(response)["token_ids"]
            return ids
    except HTTPError as error:
        raise SystemExit(f"{url}: {error.read().decode()[:500]}") from error


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
