"""Twenty rollouts of every fate, written through the store as servers and consumers write them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from token_id_capture import TokenCaptureStore, TokenEntry
from token_id_capture.consumer import trajectories_from_source
from token_id_capture.delivery import retire_rollout_token_capture
from token_id_capture.errors import RolloutFrozenError
from token_id_capture.provenance import HistoryLink

MODELS: Final = ("policy-8b", "policy-70b")
STARTED: Final = 1.75e9


@dataclass(frozen=True)
class Shape:
    """How large a rollout is: its calls, and what each adds, in tokens."""

    calls: int = 3
    new_prompt_tokens: int = 40
    generated_tokens: int = 20


def chain_of(call: int) -> bytes:
    """The hash by which a request is recognised as a continuation of a rollout's so many-th call."""
    return blake2b(b"%d" % call, digest_size=16).digest()


class Template:
    """One rollout: an agent that speaks to the store as its server would."""

    def __init__(self, store: TokenCaptureStore, rollout_id: str, shape: Shape, model: str) -> None:
        self.store = store
        self.rollout_id = rollout_id
        self.shape = shape
        self.model = model
        self.history: list[int] = []
        self._calls = 0

    async def call(self, *, answers: int = 1, put: bool = True, finish_reason: str = "stop") -> None:
        """One turn. Of several ``answers`` to one prompt, the history continues with the last."""
        shape, turn = self.shape, len(self.history)
        self.history += [(turn + at) * 7 % 150_000 for at in range(shape.new_prompt_tokens)]
        for answer in range(answers):
            self._calls += 1
            call_id = f"{self._calls:08x}"
            generation = [(turn + at + answer) * 11 % 150_000 + 1 for at in range(shape.generated_tokens)]
            await self.store.begin_call(self.rollout_id, call_id)
            if put:
                link = HistoryLink(chain_of(self._calls), b"", b"", finish_reason == "stop")
                await self.store.put(self._entry(call_id, generation, finish_reason), link)
        self.history += generation

    def _entry(self, call_id: str, generation: list[int], finish_reason: str) -> TokenEntry:
        text = "An answer as long as answers of its number of tokens usually are. " * (len(generation) // 16 + 1)
        return TokenEntry(
            rollout_id=self.rollout_id,
            model_call_id=call_id,
            model=self.model,
            prompt_token_ids=self.history,
            generation_token_ids=generation,
            generation_log_probs=[-0.01 * (at % 50) for at in range(len(generation))],
            output_items=[{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}],
            token_item_index=0,
            created_at=STARTED + self._calls,
            finish_reason=finish_reason,
            sampling={"temperature": 1.0, "top_p": 1.0},
        )

    async def calls(self, number: int) -> None:
        """So many turns, each continuing the one before."""
        for _ in range(number):
            await self.call()

    async def build(self, *, hand_on: bool = False, retire: bool = False) -> None:
        """What a consumer does: freeze, build, and after the hand-off say so, and retire."""
        built = await trajectories_from_source(self.rollout_id, self.store)
        if hand_on:
            snapshot = built["_capture_snapshot"]
            await self.store.record_outcome(snapshot["snapshot_id"], snapshot["version"], "delivered")
        if retire:
            assert await retire_rollout_token_capture(self.rollout_id, self.store, built)


async def _running(rollout: Template) -> None:
    await rollout.calls(rollout.shape.calls)


async def _in_a_call(rollout: Template) -> None:
    await rollout.calls(rollout.shape.calls)
    await rollout.call(put=False)


async def _frozen(rollout: Template) -> None:
    await rollout.calls(rollout.shape.calls)
    await rollout.store.freeze(rollout.rollout_id)


async def _delivered(rollout: Template) -> None:
    await rollout.calls(rollout.shape.calls)
    await rollout.build(hand_on=True)


async def _retired(rollout: Template) -> None:
    await rollout.calls(rollout.shape.calls)
    await rollout.build(retire=True)


async def _late(rollout: Template) -> None:
    await _delivered(rollout)
    with contextlib.suppress(RolloutFrozenError):
        await rollout.store.put(rollout._entry("late", [1, 2], "stop"))


async def _edited(rollout: Template) -> None:
    await rollout.calls(rollout.shape.calls)
    rollout.history[5] += 1
    await rollout.call()
    await rollout.build()


async def _unresolved(rollout: Template) -> None:
    await rollout.calls(rollout.shape.calls - 1)
    await rollout.call(answers=2)
    await rollout.build()


async def _flagged(rollout: Template) -> None:
    await rollout.calls(rollout.shape.calls)
    detail = "5 token ids, 12 completion tokens"
    await rollout.store.mark_incomplete(rollout.rollout_id, "00000001", f"token_count_mismatch: {detail}")
    await rollout.build()


async def _lost(rollout: Template) -> None:
    await _in_a_call(rollout)
    await rollout.build()


FATES: Final[tuple[Callable[[Template], Awaitable[None]], ...]] = (
    *([_running] * 3 + [_in_a_call] + [_frozen] * 2 + [_delivered] * 4 + [_retired] * 4),
    *(_late, _edited, _edited, _unresolved, _flagged, _lost),
)


async def write_templates(store: TokenCaptureStore, shape: Shape) -> list[str]:
    """Write one rollout of each fate; returns their ids."""
    templates = [
        Template(store, f"template-{number:02}", shape, MODELS[number % len(MODELS)]) for number in range(len(FATES))
    ]
    await asyncio.gather(*(fate(template) for fate, template in zip(FATES, templates, strict=True)))
    return [template.rollout_id for template in templates]


async def write_long_rollout(store: TokenCaptureStore, rollout_id: str, calls: int = 100) -> None:
    """One rollout of 1,000 tokens a call whose last prompt was edited, so that there is something to explain."""
    rollout = Template(store, rollout_id, Shape(calls, 700, 300), MODELS[0])
    await _edited(rollout)
