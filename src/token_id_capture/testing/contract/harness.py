"""What the parts of the suite share: how a store is opened, and what an entry looks like."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Final, cast

import pytest

from token_id_capture.protocols import (
    CallIntents,
    OutcomeRecorder,
    TokenCaptureSnapshot,
    TokenSink,
    TokenSource,
    missing_methods,
)
from token_id_capture.records import TokenEntry

ROLLOUT: Final = "contract-rollout"


class OpenedStore:
    """The two halves of an implementation, and its extensions; a missing extension skips the test."""

    def __init__(self, sink: TokenSink, source: TokenSource) -> None:
        self.sink = sink
        self.source = source

    @property
    def intents(self) -> CallIntents:
        """The sink with its call intents."""
        return cast(CallIntents, self._extended(self.sink, "begin_call", "refuse_call"))

    @property
    def outcomes(self) -> OutcomeRecorder:
        """The source with its outcomes."""
        return cast(OutcomeRecorder, self._extended(self.source, "record_outcome"))

    async def delete(self, rollout_id: str) -> None:
        """Remove a rollout and its tombstone, as is done before an id is used again."""
        await self._extended(self.source, "delete").delete([rollout_id])

    async def drop(self, snapshot: TokenCaptureSnapshot) -> bool:
        """Drop exactly this snapshot."""
        return await self.source.drop(snapshot.rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version)

    @staticmethod
    def _extended(half: Any, *methods: str) -> Any:
        missing = missing_methods(half, methods)
        if missing:
            pytest.skip(f"{type(half).__name__} lacks {', '.join(missing)}")
        return half


def make_entry(model_call_id: str, prompt: list[int] | None = None, **fields: Any) -> TokenEntry:
    """An entry of ``ROLLOUT`` with three generated tokens, unless ``fields`` say otherwise."""
    values: dict[str, Any] = {
        "rollout_id": ROLLOUT,
        "model_call_id": model_call_id,
        "prompt_token_ids": prompt or [1, 2, 3],
        "generation_token_ids": [4, 5, 6],
        "generation_log_probs": [-0.25, -1.5, -0.0078125],
        "created_at": 1700000000.125,
    }
    return TokenEntry(**{**values, **fields})


def assert_same_entry(stored: TokenEntry, put: TokenEntry) -> None:
    """Equal in every field, bit for bit in the tokens and log probabilities."""
    assert stored == put
    for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        assert getattr(stored, field).tobytes() == getattr(put, field).tobytes(), field
    assert stored.model_extra == put.model_extra


Scenario = Callable[..., Awaitable[None]]


def scenario(test: Scenario) -> Callable[..., None]:
    """Make a test of a coroutine that takes one or more stores, all opened on one fresh directory."""
    handles = len(inspect.signature(test).parameters) - 1

    @functools.wraps(test)
    def run(self: Contract, tmp_path: Path) -> None:
        async def opened() -> None:
            async with AsyncExitStack() as stack:
                opening = [self.open_store(tmp_path) for _ in range(handles)]
                await test(self, *[OpenedStore(*(await stack.enter_async_context(one))) for one in opening])

        asyncio.run(opened())

    # pytest would take the scenario's parameters for fixtures.
    del run.__wrapped__
    return run


class Contract:
    """The base of each part of the suite."""

    def open_store(self, directory: Path) -> AbstractAsyncContextManager[tuple[TokenSink, TokenSource]]:
        """Open the implementation on ``directory``, which may hold what an earlier one left there."""
        raise NotImplementedError("override open_store in your subclass of CaptureContract")
