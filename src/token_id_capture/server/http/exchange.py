"""What the gateway needs of its connections to the engine. ``Upstream`` is the real thing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import orjson
from starlette.types import Scope

from token_id_capture.server.engines.base import Ask, EngineAnswerError
from token_id_capture.server.http.upstream import RawHeaders


class Response(Protocol):
    """A response whose head has arrived. Reading it raises ``UpstreamError`` where it breaks off."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> RawHeaders:
        """Those that are meant for the client too."""
        ...

    @property
    def is_event_stream(self) -> bool: ...

    async def read(self) -> bytes:
        """The whole body as it was sent."""
        ...

    async def next_chunk(self) -> bytes:
        """What has arrived of the body, as soon as there is something; empty at its end."""
        ...


class Exchanges(Protocol):
    """Sends requests to one engine."""

    def open(self, scope: Scope, body: bytes, *, plain: bool) -> AbstractAsyncContextManager[Response]:
        """Send the request of ``scope`` with this body; ``plain`` asks for a response without compression.

        Raises:
            UpstreamError: no response arrived.
        """
        ...


def header(response: Response, name: bytes) -> str | None:
    """A header of a response; engines write the names in any case. ``name`` is in lower case."""
    return next((value.decode("latin-1") for known, value in response.headers if known.lower() == name), None)


def redirection(response: Response) -> str | None:
    """Where a response sends its client, without user and query; None if it sends it nowhere.

    Clients follow it by themselves, and what they ask there is not seen here.
    """
    location = header(response, b"location") if 300 <= response.status < 400 else None
    if location is None:
        return None
    # What is shown of it goes to the log and the database, where a key or a password has no place.
    scheme, separator, rest = re.split(r"[?#]", location, maxsplit=1)[0].rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def is_refusal(status: int) -> bool:
    """Whether this status says that the engine did not take the request, and so generated nothing.

    503 is what engines and their routers answer while they have no worker or load weights (RFC 9110, section
    15.6.4), 529 is Anthropic's word for overloaded. After any other 5xx nobody knows.
    """
    return not 200 <= status < 300 and (status < 500 or status in (503, 529))


def asker(exchanges: Exchanges, scope: Scope, read: Callable[[bytes], Any] = orjson.loads) -> Ask:
    """Asks the engine's other endpoints with the headers of the client's request ``scope``.

    ``read`` parses an answer, and raises ``ValueError`` where it is no JSON.
    """
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-type"]
    headers.append((b"content-type", b"application/json"))

    async def ask(path: str, question: Mapping[str, Any]) -> Any:
        target = {"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
        async with exchanges.open({**scope, **target}, orjson.dumps(question), plain=True) as response:
            answer = await response.read()
            if response.status != 200:
                raise EngineAnswerError(f"POST {path} answered HTTP {response.status}")
        try:
            return read(answer)
        except ValueError as error:
            raise EngineAnswerError(f"POST {path} did not answer with JSON") from error

    return ask
