"""Rollouts of every fate, for tests of the pages that show them. Their tokens and times are always the same."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from token_id_capture.consumer import trajectories_from_source
from token_id_capture.delivery import retire_rollout_token_capture
from token_id_capture.errors import RolloutFrozenError
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.tokens import TokenIds

STARTED = 1.75e9
HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=\'document.title="owned"\'>\u202e'

# From sure to very unlikely, one for each colour of the legend.
LOG_PROBS = (-0.01, -0.2, -1.0, -2.0, -4.0, -6.0)


def tokens(start: int, length: int) -> list[int]:
    return [(start + position) * 7919 % 151_936 for position in range(length)]


class Rollout:
    """An agent that speaks to the store as its server would. ``history`` is what its next prompt begins with."""

    def __init__(self, store: TokenCaptureStore, rollout_id: str) -> None:
        self.store = store
        self.rollout_id = rollout_id
        self.history: Sequence[int] = TokenIds(tokens(0, 24))
        self.calls = 0

    async def call(
        self,
        new: int = 10,
        sampled: int = 6,
        *,
        text: str = "",
        put: bool = True,
        prompt: Sequence[int] | None = None,
        goes_on: bool = True,
    ) -> Sequence[int]:
        """One call; its prompt is returned, so that it can be answered again."""
        self.calls += 1
        call_id = f"call-{self.calls:03}"
        if prompt is None:
            prompt = TokenIds.joined(TokenIds.of(self.history), TokenIds(tokens(1000 * self.calls, new)))
        generation = tokens(500_000 + 1000 * self.calls, sampled)
        await self.store.begin_call(self.rollout_id, call_id)
        if put:
            await self.store.put(
                TokenEntry(
                    rollout_id=self.rollout_id,
                    model_call_id=call_id,
                    model="policy",
                    prompt_token_ids=prompt,
                    generation_token_ids=generation,
                    generation_log_probs=[LOG_PROBS[position % len(LOG_PROBS)] for position in range(sampled)],
                    output_items=[{"type": "message", "content": [{"type": "output_text", "text": text}]}],
                    created_at=STARTED + 10 * self.calls,
                    finish_reason="stop",
                )
            )
        if goes_on:
            self.history = TokenIds.joined(TokenIds.of(prompt), TokenIds(generation))
        return prompt


async def write_rollouts(path: Path) -> None:
    """One rollout of each fate; their ids say which."""
    async with TokenCaptureStore(path) as store:
        await _delivered(Rollout(store, "delivered"))
        await _masked(Rollout(store, "masked"))
        await _retired(Rollout(store, "retired"))
        await Rollout(store, "released").call()
        await store.retire(["released"])

        frozen = Rollout(store, "frozen")
        await frozen.call()
        await store.freeze("frozen")

        running = Rollout(store, "open")
        await running.call()
        await running.call(put=False)

        await store.begin_call("nothing", "call-001")
        await store.mark_incomplete("nothing", "call-001", "no_token_ids")
        await trajectories_from_source("nothing", store)

        hostile = Rollout(store, "hostile")
        await hostile.call(text=HOSTILE)
        await store.mark_incomplete("hostile", HOSTILE, f"lost_stream: {HOSTILE}")
        await trajectories_from_source("hostile", store)


async def _delivered(rollout: Rollout) -> None:
    for number in range(3):
        await rollout.call(text=f"answer {number + 1}")
    built = await trajectories_from_source(rollout.rollout_id, rollout.store)
    snapshot = built["_capture_snapshot"]
    await rollout.store.record_outcome(snapshot["snapshot_id"], snapshot["version"], "delivered", "", built["metrics"])
    with contextlib.suppress(RolloutFrozenError):
        late = TokenEntry(
            rollout_id="delivered",
            model_call_id="late",
            prompt_token_ids=[1],
            generation_token_ids=[2],
            generation_log_probs=[-1.0],
        )
        await rollout.store.put(late)


async def _masked(rollout: Rollout) -> None:
    """Calls 1, 2, 4 and 5 in a row, 3 a retry of 4; 6 after an edit; 7 empty; 8 lost."""
    await rollout.call()
    await rollout.call()
    prompt = await rollout.call(goes_on=False)
    await rollout.call(prompt=prompt)
    await rollout.call()
    edited = [*rollout.history]
    edited[30] += 1
    rollout.history = edited
    await rollout.call()
    await rollout.call(sampled=0, goes_on=False)
    await rollout.call(put=False)
    await rollout.store.mark_incomplete(rollout.rollout_id, "call-002", "token_count_mismatch: 5 token ids, 6 tokens")
    await trajectories_from_source(rollout.rollout_id, rollout.store)


async def _retired(rollout: Rollout) -> None:
    await rollout.call()
    built = await trajectories_from_source(rollout.rollout_id, rollout.store)
    assert await retire_rollout_token_capture(rollout.rollout_id, rollout.store, built)


async def write_long_rollout(path: Path, calls: int = 100) -> None:
    """One frozen rollout of 1,000 tokens a call."""
    async with TokenCaptureStore(path) as store:
        rollout = Rollout(store, "long")
        for _ in range(calls):
            await rollout.call(new=700, sampled=300)
        await store.freeze("long")
