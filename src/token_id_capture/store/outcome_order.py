"""Which of the outcomes on a rollout counts, in words of SQL.

An outcome is about one version of a snapshot, and one on a newer version counts more, whenever it was
recorded: what a slow consumer says of the state before a mark takes back nothing that was said of
the state after it. Of the outcomes on one version the last counts.
"""

from __future__ import annotations

from typing import Final

from token_id_capture.lifecycle import Outcome

FORBIDDING: Final = f"'{Outcome.MASKED}', '{Outcome.FAILED}'"
"""The outcomes that forbid training, as SQL lists them."""

FORBIDS_TRAINING: Final = f"outcome IN ({FORBIDDING})"
"""A condition on ``build_outcomes``, in the words of the index that answers it."""

NEWEST_FIRST: Final = "version DESC, outcome_id DESC"
"""The order of a rollout's rows of ``build_outcomes`` in which the outcome that counts comes first."""

OLDEST_FIRST: Final = "version, outcome_id"
"""The same order the other way round: the last counts."""


def latest_of(snapshot: str, condition: str = "true") -> str:
    """A subquery for the ``outcome_id`` of the outcome that counts for a snapshot; NULL if there is none.

    ``snapshot`` is the column that holds the snapshot's id, ``condition`` restricts its outcomes.
    """
    return (
        f"(SELECT outcome_id FROM build_outcomes AS l WHERE l.snapshot_id = {snapshot} AND {condition} "
        f"ORDER BY {NEWEST_FIRST} LIMIT 1)"
    )
