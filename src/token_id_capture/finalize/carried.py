"""The sequence of a finished record that brings its own token ids along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture import reasons
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.rebuild import Build, build_snapshot
from token_id_capture.records import TOKEN_FIELDS, TokenEntry, strip_token_fields


def build_of_carried_tokens(rollout_id: str, record: Mapping[str, Any]) -> Build:
    """Build the items of ``response.output`` that carry generated ids as if each were a captured call."""
    carriers = [item for item in record["response"]["output"] if item.get("generation_token_ids")]
    try:
        entries = tuple(
            TokenEntry(
                rollout_id=rollout_id,
                model_call_id=f"item-{position:06d}",
                output_items=[strip_token_fields(item)],
                token_item_index=0,
                **{name: item[name] for name in TOKEN_FIELDS if name in item},
            )
            for position, item in enumerate(carriers)
        )
    except ValueError as error:
        return Build.failed(rollout_id, f"{reasons.BUILD_FAILED}: {error}", error)
    return build_snapshot(TokenCaptureSnapshot(rollout_id, entries, incomplete=False, snapshot_id="", version=0))
