"""A weight version that is stamped at one gateway is known to all when the stamp returns."""

from __future__ import annotations

import asyncio

import pytest

from support.captured import entry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.postgres import weight_version


async def test_every_store_knows_the_stamp_when_it_returns_and_believes_no_old_look(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TokenCaptureStore(postgres_url) as one, TokenCaptureStore(postgres_url) as two:
        await asyncio.to_thread(one.weights.write, "step-1")
        assert (one.weights.read(), two.weights.read()) == ("step-1", "step-1")
        await asyncio.gather(*(store.put(entry("r", str(at), [1], [2])) for at, store in enumerate((one, two))))
        assert two.weights.read() == "step-1"
    # Nobody looks any more.
    monkeypatch.setattr(weight_version, "TRUSTED_SECONDS", 0.0)
    assert two.weights.read() is None


async def test_a_stamp_that_cannot_be_stored_says_so(postgres_url: str) -> None:
    store = TokenCaptureStore(postgres_url.replace("/test_", "/absent_"))
    with pytest.raises(OSError, match="does not exist"):
        await asyncio.to_thread(store.weights.write, "step-1")
    await store.close()
