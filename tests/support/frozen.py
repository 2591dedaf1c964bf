"""One database file of each released schema, kept in ``tests/data/databases`` and never changed again.

``python tests/migration/frozen.py`` writes the file of the newest schema, with everything in it that a
run leaves behind. Do that once, before the schema is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import sys
import tempfile
from pathlib import Path

from token_id_capture.errors import RolloutFrozenError
from token_id_capture.lifecycle import CallOrigin
from token_id_capture.provenance import HistoryLink
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.file.revision import HEAD_REVISION

FOLDER = Path(__file__).parents[1] / "data" / "databases"


def entry(rollout_id: str, call: str, prompt: list[int], generation: list[int], **more: object) -> TokenEntry:
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call,
        model="policy",
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.125 * (n + 1) for n in range(len(generation))],
        output_items=[{"type": "message", "role": "assistant", "content": f"{call} said so"}],
        token_item_index=0,
        created_at=1_750_000_000.5,
        **more,
    )


OPEN = (
    entry("open", "root", [1, 2, 3], [2**32 - 1, 5], finish_reason="tool_calls", response_id="resp-1"),
    entry("open", "next", [1, 2, 3, 2**32 - 1, 5, 6], [7], weight_version="step-7", sampling={"temperature": 0.5}),
    entry("open", "retry", [1, 2, 3, 2**32 - 1, 5, 6], [8, 9], routed_experts=[[0, 3], [1, 2]], of_a_later_day="kept"),
    entry("open", "silent", [4, 4], []),
)
MASKED = (entry("masked", "root", [1], [2]), entry("masked", "other", [3], [4]))
DELIVERED = (entry("delivered", "only", [1], [2]),)


async def fill(store: TokenCaptureStore) -> None:
    """Rollouts in every state, with flags, intents, outcomes and a late write."""
    for call in OPEN:
        chain = call.model_call_id.encode().ljust(16, b"-")
        await store.put(call, HistoryLink(chain, reasoning=b"", call_ids=b"", ended=call.finish_reason is not None))
    for call in (*MASKED, *DELIVERED, entry("retired", "only", [1], [2])):
        await store.put(call)
    await store.begin_attributed_call("open", "lost", CallOrigin("reviewer", "main", None, False))
    await store.begin_call("open", "refused")
    await store.refuse_call("open", "refused", "context too long")
    await store.mark_incomplete("masked", "gone", "token_count_mismatch: 5 token ids, 12 completion tokens")
    for rollout_id, outcome, reason in (("masked", "masked", "multiple_roots"), ("delivered", "delivered", "")):
        snapshot = await store.freeze(rollout_id)
        await store.record_outcome(snapshot.snapshot_id, snapshot.version, outcome, reason, {"n_calls": 2})
    with contextlib.suppress(RolloutFrozenError):
        await store.put(entry("masked", "late", [1], [2]))
    snapshot = await store.freeze("retired")
    counted = {"n_calls": 1, "generated_tokens_captured": 1}
    await store.record_outcome(snapshot.snapshot_id, snapshot.version, "delivered", metrics=counted)
    await store.drop("retired", snapshot_id=snapshot.snapshot_id, version=snapshot.version)


def frozen(revision: str, directory: Path) -> Path:
    """Unpack the file of a released schema."""
    path = directory / f"{revision}.db"
    path.write_bytes(gzip.decompress((FOLDER / f"{revision}.db.gz").read_bytes()))
    return path


async def write_newest() -> Path:
    with tempfile.TemporaryDirectory() as directory:
        async with TokenCaptureStore(Path(directory) / "captures.db") as store:
            await fill(store)
        target = FOLDER / f"{HEAD_REVISION}.db.gz"
        target.write_bytes(gzip.compress(store.database.read_bytes(), mtime=0))
        return target


if __name__ == "__main__":
    written = asyncio.run(write_newest())
    sys.stdout.write(f"{written}: {written.stat().st_size} bytes\n")
