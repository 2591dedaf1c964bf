"""What pages are made from, read on one read-only connection. Nothing is frozen, and nothing changed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from token_id_capture.explanation import explain, stored_rollout
from token_id_capture.report.charts import cut
from token_id_capture.report.listing import lines
from token_id_capture.report.model import OverviewData, RolloutData, RolloutLine, Vocabulary
from token_id_capture.report.overview import History, overview_data
from token_id_capture.report.records import Told
from token_id_capture.report.rollout import rollout_data
from token_id_capture.store.driver import Connection
from token_id_capture.store.read import history
from token_id_capture.store.read.evidence import read_evidence
from token_id_capture.store.read.newest import ANY, Wanted, newest_rollouts

_KEPT_EVIDENCE: Final = 100
_BUILT: Final = 10_000
_WATCHED_WEIGHTS: Final = 200


def read_rollout(connection: Connection, rollout_id: str, vocabulary: Vocabulary | None) -> RolloutData:
    """One state of one rollout.

    Raises:
        UnknownRolloutError: it is not in the database.
        CorruptCaptureError: stored tokens do not match their digest.
    """
    evidence = read_evidence(connection, rollout_id)
    explained = explain(stored_rollout(evidence), None if vocabulary is None else vocabulary.decode)
    return rollout_data(evidence, explained, time.time(), vocabulary)


def read_lines(
    connection: Connection,
    told: Mapping[str, Told],
    limit: int,
    before: int | None = None,
    wanted: Wanted = ANY,
) -> tuple[RolloutLine, ...]:
    """The latest rollouts, the last opened first."""
    return lines(newest_rollouts(connection.execute, limit, before, wanted), told)


def read_overview(connection: Connection, database: str, told: Mapping[str, Told]) -> OverviewData:
    """All rollouts together. Each statement is a short read of its own."""
    span = history.outcome_span(connection)
    slots = None if span is None else cut(*span)
    kept = history.kept_evidence(connection, _KEPT_EVIDENCE + 1)
    return overview_data(
        History(
            database=database,
            made_at=time.time(),
            slots=slots,
            outcomes=[] if slots is None else history.outcome_counts(connection, slots.start, slots.width),
            states=history.state_counts(connection),
            flags=history.flag_counts(connection),
            open_calls=history.open_calls(connection),
            causes=history.cause_counts(connection),
            causes_in_time=[] if slots is None else history.causes_in_time(connection, slots.start, slots.width),
            built=history.built_rollouts(connection, _BUILT),
            weight_versions=history.weight_versions(connection, _WATCHED_WEIGHTS),
            kept=kept[:_KEPT_EVIDENCE],
            more_kept=len(kept) > _KEPT_EVIDENCE,
            told=told,
        )
    )
