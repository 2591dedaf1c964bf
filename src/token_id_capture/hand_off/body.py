"""A response whose length and digest its head tells, so that a client knows whether it has all of it.

The body is written before the first byte is sent: to memory, and to a temporary file beyond a limit. So a slow client
holds a file, and neither the rollout nor what was built of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Mapping
from typing import Final

from starlette.types import Receive, Scope, Send

from token_id_capture.hand_off.wire import DIGEST, digest_header

_IN_MEMORY: Final = 2**20
_PIECE: Final = 2**18


class Body:
    """Collects a body; write to it in a thread, as it may reach the disk."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115  closed by ``close``
        self._digest = hashlib.sha256()
        self.length = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        """Append ``data``, as a file does; pyarrow takes it for one.

        Raises:
            OSError: the disk of temporary files is full.
        """
        self._digest.update(data)
        self.length += len(data)
        if self.length > _IN_MEMORY:
            self._file.rollover()  # at once, so that a large piece is not copied in memory first
        return self._file.write(data)

    def flush(self) -> None:
        """Nothing: what was written is read by this process."""

    def headers(self) -> dict[str, str]:
        """What tells whether a copy is whole."""
        return {"content-length": str(self.length), DIGEST: digest_header(self._digest.digest())}

    def rewind(self) -> None:
        """Read from the beginning."""
        self._file.seek(0)

    def read(self) -> bytes:
        """The next piece; empty at the end."""
        return self._file.read(_PIECE)

    def close(self) -> None:
        """Give the memory or the file back."""
        self.closed = True
        self._file.close()


class BodyResponse:
    """An ASGI response of a ``Body``, which it closes."""

    def __init__(self, body: Body, media_type: str, headers: Mapping[str, str]) -> None:
        self._body = body
        told = {"content-type": media_type, "cache-control": "no-store", **body.headers(), **headers}
        self._headers = [(name.encode(), value.encode()) for name, value in told.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self._body.rewind()
            while piece := await asyncio.to_thread(self._body.read):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._body.close()
