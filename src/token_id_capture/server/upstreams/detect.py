"""Which engine answers at the upstream, found out by asking for what only it has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from token_id_capture.server.http.exchange import Exchanges
from token_id_capture.server.http.upstream import UpstreamError

ASKING_SECONDS: Final = 20.0
"""How long each question may take."""

# What /v1/models says of who owns a model.
_OWNERS: Final = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama-cpp"}


@dataclass(frozen=True)
class FoundEngine:
    """What the upstream says of itself. ``engine`` is a name of ``engines.ENGINES``, None if it is none of
    those; ``source`` is the path that told it. ``reached`` is false if nothing answered at all."""

    engine: str | None = None
    version: str | None = None
    model: str | None = None
    source: str | None = None
    reached: bool = True
    problem: str | None = None

    def __str__(self) -> str:
        named = f"{self.engine or 'an engine of unknown kind'}{f' {self.version}' if self.version else ''}"
        model = f", model {self.model}" if self.model else ""
        return f"{named}{model}" + (f" (says {self.source})" if self.source else "")


async def find_engine(exchanges: Exchanges) -> FoundEngine:
    """Ask for the models, then for the version where the engine has it. Never raises an ``Exception``."""
    try:
        models = await _answer(exchanges, "/v1/models")
    except UpstreamError as error:
        return FoundEngine(reached=False, problem=str(error))
    model, owner = _first_model(models)
    engine = _OWNERS.get(owner or "")
    source = "/v1/models" if engine else None
    # Old builds and proxies name another owner, so each is asked for what only it has.
    for path, name, members in (
        ("/server_info", "sglang", ("version", "model_path")),
        ("/get_server_info", "sglang", ("version", "model_path")),
        ("/props", "llama-cpp", ("default_generation_settings",)),
        ("/version", "vllm", ("version",)),
    ):
        if engine not in (None, name):
            continue
        answer = await _quietly(exchanges, path)
        if all(member in answer for member in members):
            version = answer.get("version") or answer.get("build_info")
            return FoundEngine(name, version if isinstance(version, str) else None, model, source or path)
    return FoundEngine(engine, None, model, source)


def _first_model(models: Any) -> tuple[str | None, str | None]:
    """The id and the owner of the first model."""
    listed = models.get("data") if isinstance(models, Mapping) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(first, Mapping):
        return None, None
    model, owner = first.get("id"), first.get("owned_by")
    return model if isinstance(model, str) else None, owner if isinstance(owner, str) else None


async def _quietly(exchanges: Exchanges, path: str) -> Mapping[str, Any]:
    try:
        answer = await _answer(exchanges, path)
    except UpstreamError:
        return {}
    return answer if isinstance(answer, Mapping) else {}


async def _answer(exchanges: Exchanges, path: str) -> Any:
    """The parsed answer to a GET; None if it is none."""
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "headers": []}
    try:
        async with asyncio.timeout(ASKING_SECONDS), exchanges.open(scope, b"", plain=True) as response:
            body = await response.read()
            return orjson.loads(body) if response.status == 200 else None
    except TimeoutError as error:
        raise UpstreamError(f"GET {path} was not answered in {ASKING_SECONDS:g} s", status=504, sent=True) from error
    except orjson.JSONDecodeError:
        return None
