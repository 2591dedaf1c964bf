"""Where ``tokcap finalize`` gets rollouts from: a database, or a gateway that hands them off."""

from __future__ import annotations

from typing import Protocol, Self

from token_id_capture.protocols import OutcomeRecorder, TokenSource
from token_id_capture.store.read.summaries import RolloutDetail


class RolloutSource(TokenSource, OutcomeRecorder, Protocol):
    """A source that records outcomes and can be asked how a rollout is. A store is one."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *raised: object) -> None: ...

    async def describe_rollout(self, rollout_id: str) -> RolloutDetail:
        """Everything stored about one rollout except its tokens.

        Raises:
            UnknownRolloutError: it is not in the database.
        """
        ...
