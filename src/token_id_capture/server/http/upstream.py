"""The engine behind the gateway: one pool of HTTP connections, and one seam for its errors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import lru_cache
from io import BytesIO
from typing import Final, TypeAlias
from urllib.parse import quote

import aiohttp
from starlette.types import Scope
from yarl import URL

from token_id_capture.capture.recorder import recorder_in
from token_id_capture.errors import ConfigurationError

RawHeaders: TypeAlias = list[tuple[bytes, bytes]]

# RFC 9110, section 7.6.1, and the names that older software treats alike. They speak of one
# connection, and the gateway has two.
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The gateway reads the whole request body, so it answered "Expect: 100-continue" itself.
_REPLACED_IN_REQUESTS: Final = frozenset({b"host", b"content-length", b"expect", b"x-tokcap-weight-version"})
# The headers in which clients of OpenAI's, Anthropic's and Google's interfaces send their key.
_CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"x-goog-api-key"})
_WRITTEN_AT_ONCE: Final = 65_536
"""Bytes of a body. A longer one goes as a file, which aiohttp writes by so many and drops once it is sent."""
_AUTOMATIC: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

# uvicorn, and so vLLM, closes a connection after five idle seconds. Reusing one that is just being
# closed would lose a call, and a generation cannot be sent again.
_KEEPALIVE_SECONDS: Final = 4.0
_NOT_PRINTABLE: Final = re.compile(rb"[^!-~]")
_FULL: Final = "The call was not sent: the gateway cannot open another connection. Try again soon."


class UpstreamError(Exception):
    """The engine gave no whole response.

    Its text names the engine's address, and is for the log and the database. ``told`` is what clients are told.
    ``sent`` is false if the engine cannot have seen the request. ``status`` is the gateway's answer, where
    no response was begun: 502, 504 for a timeout, 503 where the gateway itself has no room.
    """

    def __init__(self, message: str, *, status: int, sent: bool, told: str = "The engine did not answer.") -> None:
        super().__init__(message)
        self.told = told
        self.status = status
        self.sent = sent


class UpstreamResponse:
    """A response whose head has arrived."""

    def __init__(self, response: aiohttp.ClientResponse, name: str, read_timeout: float) -> None:
        self._response = response
        self._name = name
        self._read_timeout = read_timeout
        self.status = response.status
        self.headers = end_to_end(response.raw_headers)
        self.is_event_stream = response.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """The whole body as it was sent.

        Raises:
            UpstreamError: it broke off, or nothing came for the read timeout.
        """
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _translated(error, self._name, self._read_timeout) from error

    async def next_chunk(self) -> bytes:
        """What has arrived of the body, as soon as there is something; empty at its end.

        Raises:
            UpstreamError: as for ``read``.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _translated(error, self._name, self._read_timeout) from error


class Upstream:
    """Sends requests to the engine at ``url`` and follows no redirect, keeps no cookie, retries nothing.

    ``url`` may have a path, which is put before the path of each request. Since clients send their
    own ``/v1``, one at the end of ``url`` is left out. ``read_timeout`` is the longest silence in
    seconds, not a limit on the whole response. Without ``keep_alive`` each request has a connection of
    its own. ``api_key`` is sent as a bearer token, in place of what the client sent to prove who it is.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 10.0,
        read_timeout: float = 3600.0,
        api_key: str | None = None,
        keep_alive: bool = True,
    ) -> None:
        self.url = parse_upstream(url)
        self._name = str(self.url)
        self._base = self._name.rstrip("/")
        self._keep_alive = keep_alive
        self._api_key = api_key
        self._replaced = _REPLACED_IN_REQUESTS | (frozenset() if api_key is None else _CREDENTIALS)
        self._replaced_if_plain = self._replaced | {b"accept-encoding"}
        self._read_timeout = read_timeout
        self._longest_silence = connect_timeout + read_timeout
        self._timeout = aiohttp.ClientTimeout(
            total=None, connect=None, sock_connect=connect_timeout, sock_read=read_timeout
        )
        self._session: aiohttp.ClientSession | None = None

    @property
    def address(self) -> str:
        """Its URL, without a slash or ``/v1`` at the end."""
        return self._base

    @asynccontextmanager
    async def open(self, scope: Scope, body: bytes, *, plain: bool) -> AsyncIterator[UpstreamResponse]:
        """Send the request of ``scope`` with this body. ``plain`` asks for a response without compression.

        Raises:
            UpstreamError: no response arrived.
        """
        target = _url(self._base + _target(scope))
        headers = _text_headers(end_to_end(scope["headers"], self._replaced_if_plain if plain else self._replaced))
        if plain:
            headers.append(("Accept-Encoding", "identity"))
        if self._api_key is not None:
            headers.append(("Authorization", f"Bearer {self._api_key}"))
        try:
            # aiohttp's own limit on silence begins when all is sent, and an engine that stands still takes nothing.
            async with asyncio.timeout(self._longest_silence):
                response = await self._opened().request(
                    scope["method"],
                    target,
                    headers=headers,
                    data=BytesIO(body) if len(body) > _WRITTEN_AT_ONCE else body or None,
                    allow_redirects=False,
                )
        except (aiohttp.ClientError, OSError) as error:
            raise _translated(error, self._name, self._read_timeout) from error
        body = b""  # a long prompt need not wait for its answer
        async with response:
            if response.status < 200:
                # Such as a 101, after which it would speak another protocol.
                message = f"{self.url} answered with the status {response.status}"
                raise UpstreamError(message, status=502, sent=True, told="The engine gave no final response.")
            if (recorder := recorder_in(scope)) is not None:
                recorder.context.upstream = self._base
            yield UpstreamResponse(response, self._name, self._read_timeout)

    async def reach(self) -> None:
        """Open a connection and close it again, to find out whether the engine listens.

        Raises:
            OSError: it does not.
        """
        _, writer = await asyncio.open_connection(self.url.host, self.url.port)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _opened(self) -> aiohttp.ClientSession:
        # Made at first use: a session belongs to the event loop that runs then.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # No limit: calls would wait here unseen, and the engine has its own queue.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
                if self._keep_alive
                else aiohttp.TCPConnector(limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                skip_auto_headers=_AUTOMATIC,
                auto_decompress=False,
                max_line_size=65536,
                max_field_size=65536,
            )
        return self._session


def parse_upstream(url: str) -> URL:
    """Read an engine's base URL.

    Raises:
        ConfigurationError: it is not an http or https URL with a host.
    """
    try:
        parsed = URL(url)
        usable = parsed.scheme in ("http", "https") and bool(parsed.host) and parsed.port is not None
    except ValueError:
        usable = False
    if not usable or parsed.query_string or parsed.fragment:
        raise ConfigurationError(
            f"{url!r} is not an upstream: give the engine's address, such as http://127.0.0.1:8000"
        )
    if parsed.user is not None or parsed.password is not None:
        # It would stand in error messages and in the process list. The URL is not repeated here either.
        raise ConfigurationError(
            "the upstream URL contains a user or password: give the key in --upstream-api-key-file"
        )
    path = parsed.path.rstrip("/")
    return parsed.with_path(path.removesuffix("/v1"))


def end_to_end(headers: Iterable[tuple[bytes, bytes]], also: frozenset[bytes] = frozenset()) -> RawHeaders:
    """The headers without those that speak of one connection, and without ``also``."""
    headers = [*headers]
    dropped = _HOP_BY_HOP | also
    for name, value in headers:
        if name.lower() == b"connection":
            dropped |= {token.strip().lower() for token in value.split(b",")}
    return [(name, value) for name, value in headers if name.lower() not in dropped]


@lru_cache(maxsize=64)
def _url(encoded: str) -> URL:
    """Calls of all rollouts go to a few addresses."""
    return URL(encoded, encoded=True)


def _target(scope: Scope) -> str:
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope.get("query_string", b"")
    target = raw + (b"?" + query if query else b"")
    # It has no place in a request line; everything else stays as the client wrote it.
    return _NOT_PRINTABLE.sub(lambda found: b"%%%02X" % found[0][0], target).decode("ascii")


def _text_headers(headers: RawHeaders) -> list[tuple[str, str]]:
    decoded: list[tuple[str, str]] = []
    for name, value in headers:
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = value.decode("latin-1")
        decoded.append((name.decode("latin-1"), text))
    return decoded


def _translated(error: aiohttp.ClientError | OSError, name: str, read_timeout: float) -> UpstreamError:
    """What an error of aiohttp or of the system means for the call."""
    if isinstance(error, aiohttp.ClientConnectorError):
        full = error.os_error.errno in (errno.EMFILE, errno.ENFILE)
        told = _FULL if full else "The engine cannot be reached."
        message = f"no connection to {name}: {error}"
        return UpstreamError(message, status=503 if full else 502, sent=False, told=told)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        told = "The engine cannot be reached in time."
        return UpstreamError(f"no connection to {name} in time", status=504, sent=False, told=told)
    if isinstance(error, TimeoutError):
        silence = f"sent nothing for {read_timeout:g} s"
        return UpstreamError(f"{name} {silence}", status=504, sent=True, told=f"The engine {silence}.")
    problem = _in_words(error)
    told = f"The connection to the engine broke: {problem}."
    return UpstreamError(f"the connection to {name} broke: {problem}", status=502, sent=True, told=told)


def _in_words(error: aiohttp.ClientError | OSError) -> str:
    """What happened to the connection; what aiohttp says of it names parts of aiohttp."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it ended in the middle of a response"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it was closed before a response came"
    if isinstance(error, aiohttp.ClientConnectionResetError):
        return "it was closed while the request was sent"
    if isinstance(error, aiohttp.ClientResponseError):
        return "what came is not an HTTP response"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
