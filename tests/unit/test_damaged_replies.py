"""Whatever an engine sends, the gateway stores it exactly or says why not, and never fails the call."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.damage import check, damaged_call, outcome


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # each refusal is a warning
    yield
    logging.disable(logging.NOTSET)


async def _tried(numbers: Random) -> str:
    way, recording = damaged_call(numbers)
    return check(recording, await outcome(way, recording, numbers))


@given(st.randoms(use_true_random=False))
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_damaged_response_is_stored_exactly_or_has_a_reason(numbers: Random) -> None:
    asyncio.run(_tried(numbers))


async def test_thousands_of_damaged_responses_meet_every_reason_and_break_no_promise() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(1500):
        outcomes[await _tried(Random(seed))] += 1
    expected = {"stored", "no_token_ids", "invalid_tokens", "token_count_mismatch", "lost_stream"}
    assert expected <= outcomes.keys() <= {*expected, "log_prob_placeholder", "unknown_outcome"}
    assert min(outcomes[name] for name in expected) > 40
