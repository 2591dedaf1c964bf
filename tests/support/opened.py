"""A call to store, and SQL beside an open store: what it wrote, and damage to it."""

from __future__ import annotations

import sqlite3
from typing import Any

from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore


def call(call_id: str, prompt: list[int], generation: list[int], rollout_id: str = "r", **fields: Any) -> TokenEntry:
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call_id,
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.5 - index for index in range(len(generation))],
        **fields,
    )


def rows(store: TokenCaptureStore, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(f"file:{store.database}?mode=ro", uri=True)
    try:
        return connection.execute(statement, parameters).fetchall()
    finally:
        connection.close()


def change(store: TokenCaptureStore, statement: str, *parameters: Any) -> None:
    connection = sqlite3.connect(store.database)
    try:
        with connection:
            connection.execute(statement, parameters)
    finally:
        connection.close()
