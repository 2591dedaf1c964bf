"""Calls whose every byte follows from their ids, so that anybody can tell what must be stored."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache
from typing import Any

import orjson

from token_id_capture.records import TokenEntry
from token_id_capture.tokens import TokenIds

STREAM_TOKENS = 4096


@lru_cache(maxsize=1024)
def stream(rollout_id: str) -> TokenIds:
    """All tokens that calls of this rollout may hold; each prompt is a beginning of it."""
    return TokenIds.from_bytes(random.Random(rollout_id).randbytes(4 * STREAM_TOKENS))


def call_id(prompt: int, generation: int, salt: str) -> str:
    """The id of a call that reads ``prompt`` tokens of the stream and generates the next ones."""
    return f"{prompt}-{generation}-{salt}"


def lengths(model_call_id: str) -> tuple[int, int]:
    """The lengths of prompt and generation that an id holds."""
    prompt, generation, _ = model_call_id.split("-", 2)
    return int(prompt), int(generation)


def entry_of(rollout_id: str, model_call_id: str, variant: str = "") -> TokenEntry:
    """The one entry of these ids; another ``variant`` has the same tokens and other log probabilities."""
    prompt, generation = lengths(model_call_id)
    dice = random.Random(f"{rollout_id}/{model_call_id}/{variant}")
    tokens = stream(rollout_id)
    text = "".join(chr(dice.choice((0x41, 0xE4, 0x4E00, 0x1F600)) + dice.randrange(20)) for _ in range(12))
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        model="torture",
        prompt_token_ids=tokens[:prompt],
        generation_token_ids=tokens[prompt : prompt + generation],
        generation_log_probs=[-20 * dice.random() for _ in range(generation)],
        output_items=[{"type": "message", "content": text, "n": dice.randrange(2**53)}],
        token_item_index=0,
        created_at=dice.uniform(1e9, 2e9),
        finish_reason=dice.choice([None, "stop", "length"]),
        sampling={"temperature": dice.random()},
        routed_experts=dice.choice([None, [dice.randrange(64) for _ in range(8)]]),
        unknown_field={"kept": text},
    )


def digest_of(entry: TokenEntry) -> str:
    """sha256 of the canonical record: token ids and log probabilities as bytes, all the rest as sorted JSON."""
    packed = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    rest: dict[str, Any] = {name: value for name, value in entry if name not in packed}
    digest = hashlib.sha256(orjson.dumps(rest, option=orjson.OPT_SORT_KEYS))
    for name in packed:
        data = getattr(entry, name).tobytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]
