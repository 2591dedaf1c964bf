"""Views: times with microseconds, the order of calls in time, and what a retired rollout held.

Revision ID: 0002
Revises: 0001
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def utc(column: str, name: str) -> str:
    """Seconds since the epoch as text. SQLite's own functions stop at milliseconds."""
    microseconds = f"CAST(round({column} * 1000000) AS INTEGER)"
    return f"datetime({microseconds} / 1000000, 'unixepoch') || printf('.%06d', {microseconds} % 1000000) AS {name}"


# Outcomes outlive a rollout; those of an earlier use of its id say nothing about this one.
LATEST_OUTCOME = """(
               SELECT {value} FROM build_outcomes AS o
                WHERE o.rollout_id = r.rollout_id AND o.recorded_at >= r.opened_at
                ORDER BY o.version DESC, o.outcome_id DESC LIMIT 1)"""

# A released outcome has no numbers, and the one before it does. Older releases of SQLite trust json_each
# in a view, and json_extract not.
COUNTED = """(
               SELECT j.value FROM build_outcomes AS o JOIN json_each(o.metrics, '$.{number}') AS j
                WHERE o.rollout_id = r.rollout_id AND o.recorded_at >= r.opened_at
                ORDER BY o.version DESC, o.outcome_id DESC LIMIT 1)"""

PROCESS = f"""w.pid, w.host, w.writer_id, w.boot_id,
           {utc("w.started_at", "process_started")},
           {utc("w.last_seen_at", "process_last_seen")}"""

VIEWS = {
    "rollout_overview": f"""
    CREATE VIEW rollout_overview AS
    SELECT r.rollout_id, r.state, r.version, r.snapshot_id,
           iif(r.state = 'retired', {COUNTED.format(number="n_calls")},
               (SELECT count(*) FROM entries AS e WHERE e.rollout_id = r.rollout_id)) AS calls,
           iif(r.state = 'retired', NULL,
               (SELECT coalesce(max(e.sequence_length - e.generation_length), 0) FROM entries AS e
                 WHERE e.rollout_id = r.rollout_id)) AS longest_prompt,
           iif(r.state = 'retired', NULL,
               (SELECT coalesce(max(e.sequence_length), 0) FROM entries AS e
                 WHERE e.rollout_id = r.rollout_id)) AS longest_sequence,
           iif(r.state = 'retired', {COUNTED.format(number="generated_tokens_captured")},
               (SELECT coalesce(sum(e.generation_length), 0) FROM entries AS e
                 WHERE e.rollout_id = r.rollout_id)) AS generated_tokens,
           EXISTS (SELECT 1 FROM incomplete_flags AS f WHERE f.rollout_id = r.rollout_id)
             OR EXISTS (SELECT 1 FROM call_intents AS i
                         WHERE i.rollout_id = r.rollout_id AND i.outcome IS NULL) AS incomplete,
           (SELECT count(*) FROM incomplete_flags AS f WHERE f.rollout_id = r.rollout_id) AS flags,
           (SELECT count(*) FROM call_intents AS i
             WHERE i.rollout_id = r.rollout_id AND i.outcome IS NULL) AS open_calls,
           {LATEST_OUTCOME.format(value="o.outcome")} AS latest_outcome,
           {LATEST_OUTCOME.format(value="o.reason")} AS latest_reason,
           {utc("r.opened_at", "opened")},
           CAST(strftime('%s', 'now') - r.opened_at AS INTEGER) AS age_seconds
    FROM rollouts AS r
    """,
    "kept_evidence": f"""
    CREATE VIEW kept_evidence AS
    SELECT s.rollout_id, s.snapshot_id, s.version, s.entry_count AS calls, s.incomplete,
           o.outcome, o.reason, o.version AS judged_version,
           (SELECT group_concat(j.value, '; ') FROM json_each(o.metrics, '$.reasons') AS j) AS all_reasons,
           (SELECT group_concat(
                       f.reason
                       || iif(f.model_call_id = '', '', ' (call ' || f.model_call_id || ')')
                       || iif(f.detail = '', '', ': ' || f.detail), '; ')
              FROM snapshot_flags AS f
             WHERE f.snapshot_id = s.snapshot_id AND f.version = s.version) AS flags,
           {utc("s.frozen_at", "frozen")},
           {utc("o.recorded_at", "judged")}
    FROM build_outcomes AS o
    JOIN snapshots AS s ON s.snapshot_id = o.snapshot_id
    WHERE o.outcome IN ('masked', 'failed')
      AND NOT EXISTS (SELECT 1 FROM build_outcomes AS later
                       WHERE later.snapshot_id = o.snapshot_id
                         AND (later.version, later.outcome_id) > (o.version, o.outcome_id))
    """,
    "lost_calls": f"""
    CREATE VIEW lost_calls AS
    SELECT i.rollout_id, i.model_call_id, r.state AS rollout_state,
           (SELECT group_concat(f.reason || iif(f.detail = '', '', ': ' || f.detail), '; ')
              FROM incomplete_flags AS f
             WHERE f.rollout_id = i.rollout_id AND f.model_call_id = i.model_call_id) AS flags,
           {utc("i.begun_at", "begun")},
           CAST(strftime('%s', 'now') - i.begun_at AS INTEGER) AS age_seconds,
           {PROCESS}
    FROM call_intents AS i
    LEFT JOIN rollouts AS r ON r.rollout_id = i.rollout_id
    LEFT JOIN writers AS w ON w.writer_id = i.writer_id
    WHERE i.outcome IS NULL
    """,
    "late_calls": f"""
    CREATE VIEW late_calls AS
    SELECT l.rollout_id, l.model_call_id, l.state AS refused_as, r.state AS rollout_state,
           {utc("l.attempted_at", "attempted")},
           CAST(l.attempted_at - r.frozen_at AS INTEGER) AS seconds_after_freeze,
           {PROCESS}
    FROM late_writes AS l
    LEFT JOIN rollouts AS r ON r.rollout_id = l.rollout_id
    LEFT JOIN writers AS w ON w.writer_id = l.writer_id
    """,
    # A row number only grows, and VACUUM keeps the order; a time may be that of another clock.
    "call_chain": f"""
    CREATE VIEW call_chain AS
    SELECT e.rollout_id, e.model_call_id, e.prefix_call_id AS parent_call_id,
           (WITH RECURSIVE above(call_id) AS (
                SELECT e.prefix_call_id WHERE e.prefix_call_id IS NOT NULL
                UNION ALL
                SELECT p.prefix_call_id FROM above
                  JOIN entries AS p ON p.rollout_id = e.rollout_id AND p.model_call_id = above.call_id
                 WHERE p.prefix_call_id IS NOT NULL)
            SELECT count(*) + 1 FROM above) AS turn,
           e.prompt_length, e.prefix_length AS shared_tokens,
           round(1.0 * e.prefix_length / max(e.prompt_length, 1), 4) AS shared_fraction,
           e.prompt_length - e.prefix_length AS new_prompt_tokens,
           e.generation_length, e.model, e.finish_reason,
           {utc("e.created_at", "created")},
           {utc("e.stored_at", "stored")},
           e.rowid AS stored_order,
           (WITH RECURSIVE above(call_id, distance) AS (
                SELECT e.model_call_id, 0
                UNION ALL
                SELECT p.prefix_call_id, above.distance + 1 FROM above
                  JOIN entries AS p ON p.rollout_id = e.rollout_id AND p.model_call_id = above.call_id
                 WHERE p.prefix_call_id IS NOT NULL)
            SELECT call_id FROM above ORDER BY distance DESC LIMIT 1) AS root_call_id
    FROM entries AS e
    """,
}


def upgrade() -> None:
    for name, statement in VIEWS.items():
        op.execute(f"DROP VIEW {name}")
        op.execute(statement)
