"""A plugin of Datasette: readable cells, and functions that decode token columns."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, Final

import orjson
from datasette import hookimpl

from token_id_capture.errors import InvalidEntryError
from token_id_capture.tokens import LogProbs, TokenIds

_SHOWN: Final = 12
_TOKEN_COLUMNS: Final = ("prompt_suffix", "generation")
_DIGESTS: Final = ("payload_digest", "sequence_digest")


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
