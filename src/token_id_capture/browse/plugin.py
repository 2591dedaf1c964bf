"""A plugin of Datasette: readable cells, functions that decode token columns, and a check of who asks."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import orjson
from datasette import hookimpl

from token_id_capture.errors import InvalidEntryError
from token_id_capture.tokens import LogProbs, TokenIds

if TYPE_CHECKING:
    from datasette.app import Datasette

_SHOWN: Final = 12
_TOKEN_COLUMNS: Final = ("prompt_suffix", "generation")
_DIGESTS: Final = ("payload_digest", "sequence_digest")
_REFUSAL: Final = b"tokcap browse answers to 127.0.0.1 and localhost\n"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")


@hookimpl  # type: ignore[untyped-decorator]
def render_cell(value: Any, column: str) -> str | None:
    """Token ids and log probabilities as numbers, and digests in hexadecimal; None leaves a cell as it is."""
    if not isinstance(value, bytes):
        return None
    try:
        if column in _TOKEN_COLUMNS:
            return _numbers(TokenIds.from_bytes(value), "token", "{}")
        if column == "log_probs":
            return _numbers(LogProbs.from_bytes(value), "log probability", "{:.4f}")
    except InvalidEntryError:
        return None
    return value.hex() if column in _DIGESTS else None


def _numbers(values: TokenIds | LogProbs, noun: str, form: str) -> str:
    count = len(values)
    plural = noun if count == 1 else f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"
    shown = " ".join(form.format(value) for value in values[:_SHOWN])
    return f"{count:,} {plural}: {shown}{' …' if count > _SHOWN else ''}" if count else f"0 {plural}"


@hookimpl  # type: ignore[untyped-decorator]
def prepare_connection(conn: sqlite3.Connection) -> None:
    """``token_ids(blob)`` and ``log_probs(blob)``, as in ``tokcap sql``."""
    conn.create_function("token_ids", 1, _decoder(TokenIds), deterministic=True)
    conn.create_function("log_probs", 1, _decoder(LogProbs), deterministic=True)


def _decoder(packed: type[TokenIds] | type[LogProbs]) -> Callable[[bytes | None], str | None]:
    return lambda blob: None if blob is None else orjson.dumps(packed.from_bytes(blob).tolist()).decode()


@hookimpl  # type: ignore[untyped-decorator]
def asgi_wrapper(datasette: Datasette) -> Callable[[Any], Any]:
    """Answer only to names of this machine.

    A page of another site can make a browser send requests to loopback under a name of its own
    (DNS rebinding), and would then be allowed to read the answers.
    """

    def wrap(app: Any) -> Any:
        async def guarded(scope: dict[str, Any], receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
            if scope["type"] == "http" and not _is_loopback(dict(scope["headers"]).get(b"host", b"")):
                headers = [(b"content-type", b"text/plain; charset=utf-8")]
                await send({"type": "http.response.start", "status": 421, "headers": headers})
                await send(
                    {"type": "http.response.body", "body": b"tokcap browse answers to 127.0.0.1 and localhost\n"}
                )
                return
            await app(scope, receive, send)

        return guarded

    return wrap


def _is_loopback(host: bytes) -> bool:
    name, _, port = host.decode("latin-1").rpartition(":")
    return (name in _LOOPBACK and port.isdigit()) or host.decode("latin-1") in _LOOPBACK
