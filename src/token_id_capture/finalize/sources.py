"""The two sources that ``tokcap finalize`` builds from: the store, and what a record itself carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.records import TOKEN_FIELDS, TokenEntry, strip_token_fields
from token_id_capture.store import TokenCaptureStore


class WatchedStore:
    """The store, remembering why a freeze failed: the build itself only says that it did."""

    def __init__(self, store: TokenCaptureStore) -> None:
        self._store = store
        self.drop, self.record_outcome, self.close = store.drop, store.record_outcome, store.close
        self.failures: dict[str, Exception] = {}

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        try:
            return await self._store.freeze(rollout_id)
        except Exception as error:
            self.failures[rollout_id] = error
            raise


class CarriedTokens:
    """The token arrays on the items of a finished record, as if each item were a captured call."""

    def __init__(self, rollout_id: str, record: Mapping[str, Any]) -> None:
        """Read the items of ``response.output`` that carry generated ids.

        Raises:
            ValueError: an item's arrays are partial or malformed.
        """
        carriers = [item for item in record["response"]["output"] if item.get("generation_token_ids")]
        self._entries = tuple(
            TokenEntry(
                rollout_id=rollout_id,
                model_call_id=f"item-{position:06d}",
                output_items=[strip_token_fields(item)],
                token_item_index=0,
                **{name: item[name] for name in TOKEN_FIELDS if name in item},
            )
            for position, item in enumerate(carriers)
        )

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        return TokenCaptureSnapshot(rollout_id, self._entries, incomplete=False, snapshot_id="", version=0)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return False

    async def close(self) -> None:
        pass
