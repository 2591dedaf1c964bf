"""A thread that sends ended spans by OTLP over HTTP, a batch in a request, as OpenTelemetry's variables say."""

from __future__ import annotations

import gzip
import logging
import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Final
from urllib.error import HTTPError
from urllib.parse import unquote
from urllib.request import Request, urlopen

from token_id_capture.errors import ConfigurationError
from token_id_capture.server.tracing.spans import EndedCall

_logger = logging.getLogger(__name__)

_AGAIN: Final = frozenset({429, 502, 503, 504})
_FIRST_PAUSE: Final = 0.5
_CLOSE_SECONDS: Final = 5.0
"""A worker has ten seconds to close, and what waits for a collector that hangs is not worth them all."""
_COMPRESSIONS: Final = ("none", "gzip")
_PROTOCOL: Final = "http/protobuf"


@dataclass(frozen=True)
class Destination:
    """Where spans go. ``timeout`` is the seconds that a batch may take, tries again included."""

    url: str
    headers: Mapping[str, str]
    timeout: float
    compress: bool
    tls: ssl.SSLContext | None

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Destination:
        """What ``OTEL_EXPORTER_OTLP_TRACES_...`` say, or else ``OTEL_EXPORTER_OTLP_...``.

        Raises:
            ConfigurationError: a value is not usable.
        """

        def told(name: str, default: str = "") -> str:
            general = variables.get(f"OTEL_EXPORTER_OTLP_{name}", "").strip()
            return variables.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}", "").strip() or general or default

        url = variables.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip()
        url = url or f"{told('ENDPOINT', 'http://localhost:4318').rstrip('/')}/v1/traces"
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError("OTEL_EXPORTER_OTLP_ENDPOINT must be a URL, such as http://127.0.0.1:4318")
        if (protocol := told("PROTOCOL", _PROTOCOL)) != _PROTOCOL:
            raise ConfigurationError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, but spans go by {_PROTOCOL}")
        if (compression := told("COMPRESSION", "none").lower()) not in _COMPRESSIONS:
            raise ConfigurationError(f"OTEL_EXPORTER_OTLP_COMPRESSION must be one of {', '.join(_COMPRESSIONS)}")
        headers = {"content-type": "application/x-protobuf", "user-agent": "token-id-capture"}
        for pair in filter(None, told("HEADERS").split(",")):
            name, _, value = pair.partition("=")
            headers[unquote(name).strip().lower()] = unquote(value).strip()
        if compression == "gzip":
            headers["content-encoding"] = "gzip"
        try:
            seconds = float(told("TIMEOUT", "10"))
            tls = _tls(told("CERTIFICATE"), told("CLIENT_CERTIFICATE"), told("CLIENT_KEY"))
        except (ValueError, OSError) as error:  # ssl.SSLError is an OSError
            raise ConfigurationError(f"a variable OTEL_EXPORTER_OTLP_... is not usable: {error}") from error
        return cls(url, headers, seconds, compression == "gzip", tls if url.startswith("https") else None)

    def send(self, body: bytes, deadline: float) -> None:
        """Send once.

        Raises:
            OSError, HTTPException: it was not taken.
        """
        request = Request(self.url, body, dict(self.headers), method="POST")
        with urlopen(request, timeout=max(0.1, deadline - time.monotonic()), context=self.tls) as response:
            response.read()


def _tls(authority: str, certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority or None)
    if certificate:
        context.load_cert_chain(certificate, key or None)
    return context


@dataclass(frozen=True)
class Batching:
    """How many spans wait at most, how many seconds, and how many go into a request."""

    most: int
    seconds: float
    each: int

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Batching:
        """What ``OTEL_BSP_...`` say.

        Raises:
            ConfigurationError: a value is not a whole number above 0.
        """

        def number(name: str, default: int) -> int:
            told = variables.get(f"OTEL_BSP_{name}", "").strip() or str(default)
            if not (told.isascii() and told.isdecimal() and int(told)):
                raise ConfigurationError(f"OTEL_BSP_{name} must be a whole number above 0")
            return int(told)

        most = number("MAX_QUEUE_SIZE", 2048)
        return cls(most, number("SCHEDULE_DELAY", 5000) / 1000, min(most, number("MAX_EXPORT_BATCH_SIZE", 512)))


class Sender:
    """Sends what is added. A span for which there is no room is dropped, so that no call waits.

    ``write`` makes the body of a request from a batch. The thread starts with the first span.
    """

    def __init__(self, destination: Destination, batching: Batching, write: Callable[[list[EndedCall]], bytes]) -> None:
        self._destination = destination
        self._batching = batching
        self._write = write
        self._waiting: deque[EndedCall] = deque()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._dropped = 0

    def add(self, call: EndedCall) -> None:
        """Hand a span over; from one thread only."""
        waiting = len(self._waiting)
        if waiting >= self._batching.most:
            self._dropped += 1
            return
        self._waiting.append(call)
        if waiting + 1 == self._batching.each:
            self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tokcap-spans", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Send what waits, for a few seconds. Blocks. Idempotent."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(self._batching.seconds)
            self._wake.clear()
            # Not one small batch after the other: what came meanwhile waits for its own turn.
            sent = self._send()
            while sent and len(self._waiting) >= self._batching.each:
                sent = self._send()
        while self._waiting and self._send():
            pass

    def _send(self) -> bool:
        """Send a batch; False if it was not taken, and is lost."""
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._batching.each))]
        dropped, self._dropped = self._dropped, 0
        if dropped:
            _logger.warning("%d spans were dropped, as too many waited to be sent", dropped)
        if not batch:
            return True
        try:
            body = self._write(batch)
            self._deliver(gzip.compress(body, 1) if self._destination.compress else body)
        except Exception as error:  # whatever it is, it must cost only these spans
            _logger.warning("%d spans are lost, as the collector did not take them: %s", len(batch), error)
            return False
        return True

    def _deliver(self, body: bytes) -> None:
        deadline, pause = time.monotonic() + self._destination.timeout, _FIRST_PAUSE
        while True:
            try:
                return self._destination.send(body, deadline)
            except (OSError, HTTPException) as error:
                final = isinstance(error, HTTPError) and error.code not in _AGAIN
                if final or self._closed.is_set() or time.monotonic() + pause > deadline:
                    raise
            self._closed.wait(pause)
            pause *= 2
