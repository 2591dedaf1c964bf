"""Create the whole schema: tables, triggers and views.

The statements are frozen here. A later change is a later revision.

Revision ID: 0001
Revises:
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = [
    """
    CREATE TABLE rollouts (
        rollout_id TEXT NOT NULL,
        incarnation TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('open', 'frozen', 'retired')),
        version INTEGER NOT NULL,
        snapshot_id TEXT,
        opened_at REAL NOT NULL,
        frozen_at REAL,
        retired_at REAL,
        PRIMARY KEY (rollout_id)
    ) STRICT
    """,
    "CREATE INDEX rollouts_by_retirement ON rollouts (retired_at) WHERE state = 'retired'",
    "CREATE INDEX rollouts_by_state ON rollouts (state, rollout_id)",
    """
    CREATE TABLE writers (
        writer_id TEXT NOT NULL,
        pid INTEGER NOT NULL,
        host TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        started_at REAL NOT NULL,
        last_seen_at REAL NOT NULL,
        PRIMARY KEY (writer_id)
    ) STRICT
    """,
    """
    CREATE TABLE entries (
        rollout_id TEXT NOT NULL,
        model_call_id TEXT NOT NULL,
        payload_digest BLOB NOT NULL,
        sequence_digest BLOB NOT NULL,
        prefix_call_id TEXT,
        prefix_length INTEGER NOT NULL,
        prompt_length INTEGER NOT NULL,
        generation_length INTEGER NOT NULL,
        sequence_length INTEGER NOT NULL,
        schema_version INTEGER NOT NULL,
        model TEXT NOT NULL,
        finish_reason TEXT,
        created_at REAL NOT NULL,
        stored_at REAL NOT NULL,
        writer_id TEXT NOT NULL,
        content TEXT NOT NULL,
        extras TEXT NOT NULL,
        prompt_suffix BLOB NOT NULL,
        generation BLOB NOT NULL,
        log_probs BLOB NOT NULL,
        routed_experts BLOB,
        PRIMARY KEY (rollout_id, model_call_id),
        CHECK (length(prompt_suffix) = 4 * (prompt_length - prefix_length)),
        CHECK (length(generation) = 4 * generation_length),
        CHECK (length(log_probs) = 8 * generation_length),
        CHECK (sequence_length = prompt_length + generation_length),
        CHECK ((prefix_call_id IS NULL) = (prefix_length = 0)),
        FOREIGN KEY(rollout_id) REFERENCES rollouts (rollout_id)
    ) STRICT
    """,
    "CREATE INDEX entries_by_length ON entries (rollout_id, sequence_length, generation_length, model)",
    """
    CREATE TABLE call_intents (
        rollout_id TEXT NOT NULL,
        model_call_id TEXT NOT NULL,
        writer_id TEXT NOT NULL,
        begun_at REAL NOT NULL,
        outcome TEXT CHECK (outcome IN ('refused')),
        detail TEXT NOT NULL,
        PRIMARY KEY (rollout_id, model_call_id),
        FOREIGN KEY(rollout_id) REFERENCES rollouts (rollout_id),
        FOREIGN KEY(writer_id) REFERENCES writers (writer_id)
    ) STRICT
    """,
    """
    CREATE TABLE incomplete_flags (
        flag_id INTEGER NOT NULL,
        rollout_id TEXT NOT NULL,
        model_call_id TEXT NOT NULL,
        reason TEXT NOT NULL,
        detail TEXT NOT NULL,
        flagged_at REAL NOT NULL,
        PRIMARY KEY (flag_id),
        FOREIGN KEY(rollout_id) REFERENCES rollouts (rollout_id)
    ) STRICT
    """,
    "CREATE INDEX incomplete_flags_by_rollout ON incomplete_flags (rollout_id)",
    """
    CREATE TABLE late_writes (
        rollout_id TEXT NOT NULL,
        model_call_id TEXT NOT NULL,
        state TEXT NOT NULL,
        payload_digest BLOB NOT NULL,
        writer_id TEXT NOT NULL,
        attempted_at REAL NOT NULL,
        PRIMARY KEY (rollout_id, model_call_id)
    ) STRICT
    """,
    """
    CREATE TABLE snapshots (
        snapshot_id TEXT NOT NULL,
        version INTEGER NOT NULL,
        rollout_id TEXT NOT NULL,
        incomplete INTEGER NOT NULL CHECK (incomplete IN (0, 1)),
        entry_count INTEGER NOT NULL,
        frozen_at REAL NOT NULL,
        PRIMARY KEY (snapshot_id, version),
        FOREIGN KEY(rollout_id) REFERENCES rollouts (rollout_id)
    ) STRICT
    """,
    "CREATE INDEX snapshots_by_rollout ON snapshots (rollout_id)",
    """
    CREATE TABLE snapshot_entries (
        snapshot_id TEXT NOT NULL,
        version INTEGER NOT NULL,
        model_call_id TEXT NOT NULL,
        payload_digest BLOB NOT NULL,
        sequence_digest BLOB NOT NULL,
        prefix_call_id TEXT,
        prefix_length INTEGER NOT NULL,
        prompt_length INTEGER NOT NULL,
        generation_length INTEGER NOT NULL,
        sequence_length INTEGER NOT NULL,
        schema_version INTEGER NOT NULL,
        model TEXT NOT NULL,
        finish_reason TEXT,
        created_at REAL NOT NULL,
        stored_at REAL NOT NULL,
        writer_id TEXT NOT NULL,
        content TEXT NOT NULL,
        extras TEXT NOT NULL,
        prompt_suffix BLOB NOT NULL,
        generation BLOB NOT NULL,
        log_probs BLOB NOT NULL,
        routed_experts BLOB,
        PRIMARY KEY (snapshot_id, version, model_call_id),
        CHECK (length(prompt_suffix) = 4 * (prompt_length - prefix_length)),
        CHECK (length(generation) = 4 * generation_length),
        CHECK (length(log_probs) = 8 * generation_length),
        CHECK (sequence_length = prompt_length + generation_length),
        CHECK ((prefix_call_id IS NULL) = (prefix_length = 0)),
        FOREIGN KEY(snapshot_id, version) REFERENCES snapshots (snapshot_id, version) DEFERRABLE INITIALLY DEFERRED
    ) STRICT
    """,
    """
    CREATE TABLE snapshot_flags (
        snapshot_flag_id INTEGER NOT NULL,
        snapshot_id TEXT NOT NULL,
        version INTEGER NOT NULL,
        model_call_id TEXT NOT NULL,
        reason TEXT NOT NULL,
        detail TEXT NOT NULL,
        flagged_at REAL NOT NULL,
        PRIMARY KEY (snapshot_flag_id),
        FOREIGN KEY(snapshot_id, version) REFERENCES snapshots (snapshot_id, version) DEFERRABLE INITIALLY DEFERRED
    ) STRICT
    """,
    "CREATE INDEX snapshot_flags_by_snapshot ON snapshot_flags (snapshot_id, version)",
    """
    CREATE TABLE build_outcomes (
        outcome_id INTEGER NOT NULL,
        snapshot_id TEXT NOT NULL,
        version INTEGER NOT NULL,
        rollout_id TEXT NOT NULL,
        outcome TEXT NOT NULL CHECK (outcome IN ('delivered', 'masked', 'failed', 'released')),
        reason TEXT NOT NULL,
        metrics TEXT NOT NULL,
        recorded_at REAL NOT NULL,
        PRIMARY KEY (outcome_id)
    ) STRICT
    """,
    "CREATE INDEX build_outcomes_by_rollout ON build_outcomes (rollout_id, version)",
    "CREATE INDEX build_outcomes_by_snapshot ON build_outcomes (snapshot_id, version)",
    """
    CREATE INDEX build_outcomes_masked ON build_outcomes (rollout_id, snapshot_id)
    WHERE outcome IN ('masked', 'failed')
    """,
    """
    CREATE TABLE numbers (
        n INTEGER NOT NULL,
        PRIMARY KEY (n)
    ) STRICT
    """,
]

SNAPSHOT_TABLES = ("snapshots", "snapshot_entries", "snapshot_flags")

IMMUTABLE = """
CREATE TRIGGER {table}_immutable BEFORE UPDATE ON {table}
BEGIN
    SELECT RAISE(ABORT, 'a snapshot is immutable; freeze the rollout again for a new version');
END
"""

# Also a REPLACE comes here first: in most programs it fires no delete trigger. A rowid that nobody
# named reads as -1, which no row has.
SEALED = """
CREATE TRIGGER {table}_sealed BEFORE INSERT ON {table}
WHEN EXISTS (SELECT 1 FROM snapshots WHERE snapshot_id = NEW.snapshot_id AND version = NEW.version)
  OR EXISTS (SELECT 1 FROM {table} WHERE rowid = NEW.rowid)
BEGIN
    SELECT RAISE(ABORT, 'a snapshot is immutable; freeze the rollout again for a new version');
END
"""

EVIDENCE = """
CREATE TRIGGER {table}_evidence BEFORE DELETE ON {table}
WHEN (
    SELECT outcome FROM build_outcomes WHERE snapshot_id = OLD.snapshot_id
    ORDER BY version DESC, outcome_id DESC LIMIT 1
) IN ('masked', 'failed')
BEGIN
    SELECT RAISE(ABORT, 'a masked or failed snapshot is evidence; record the outcome released to delete it');
END
"""

AUDIT_TRAIL = [
    """
    CREATE TRIGGER build_outcomes_append_only BEFORE UPDATE ON build_outcomes
    BEGIN
        SELECT RAISE(ABORT, 'outcomes are append-only; record a new one');
    END
    """,
    """
    CREATE TRIGGER build_outcomes_not_replaced BEFORE INSERT ON build_outcomes
    WHEN EXISTS (SELECT 1 FROM build_outcomes WHERE outcome_id = NEW.outcome_id)
    BEGIN
        SELECT RAISE(ABORT, 'outcomes are append-only; record a new one');
    END
    """,
    """
    CREATE TRIGGER build_outcomes_kept BEFORE DELETE ON build_outcomes
    WHEN EXISTS (SELECT 1 FROM snapshots WHERE snapshot_id = OLD.snapshot_id)
    BEGIN
        SELECT RAISE(ABORT, 'an outcome is kept for as long as its snapshot');
    END
    """,
]

# A token is four bytes, least significant first, and a byte is where instr finds it among all bytes.
TOKEN_ID = " + ".join(
    f"((instr(x'{bytes(range(256)).hex()}', substr(four, {byte + 1}, 1)) - 1) << {8 * byte})" for byte in range(4)
)

# Outcomes outlive a rollout; those of an earlier use of its id say nothing about this one.
LATEST_OUTCOME = """(
               SELECT o.{column} FROM build_outcomes AS o
                WHERE o.rollout_id = r.rollout_id AND o.recorded_at >= r.opened_at
                ORDER BY o.version DESC, o.outcome_id DESC LIMIT 1)"""

PROCESS = """w.pid, w.host, w.writer_id, w.boot_id,
           datetime(w.started_at, 'unixepoch') AS process_started,
           datetime(w.last_seen_at, 'unixepoch') AS process_last_seen"""

# All times are text in UTC. Left joins also fix the order of the loops: the table that is filtered
# comes first. docs/views.md explains each column.
VIEWS = [
    f"""
    CREATE VIEW rollout_overview AS
    SELECT r.rollout_id, r.state, r.version, r.snapshot_id,
           (SELECT count(*) FROM entries AS e WHERE e.rollout_id = r.rollout_id) AS calls,
           (SELECT coalesce(max(e.sequence_length - e.generation_length), 0) FROM entries AS e
             WHERE e.rollout_id = r.rollout_id) AS longest_prompt,
           (SELECT coalesce(max(e.sequence_length), 0) FROM entries AS e
             WHERE e.rollout_id = r.rollout_id) AS longest_sequence,
           (SELECT coalesce(sum(e.generation_length), 0) FROM entries AS e
             WHERE e.rollout_id = r.rollout_id) AS generated_tokens,
           EXISTS (SELECT 1 FROM incomplete_flags AS f WHERE f.rollout_id = r.rollout_id)
             OR EXISTS (SELECT 1 FROM call_intents AS i
                         WHERE i.rollout_id = r.rollout_id AND i.outcome IS NULL) AS incomplete,
           (SELECT count(*) FROM incomplete_flags AS f WHERE f.rollout_id = r.rollout_id) AS flags,
           (SELECT count(*) FROM call_intents AS i
             WHERE i.rollout_id = r.rollout_id AND i.outcome IS NULL) AS open_calls,
           {LATEST_OUTCOME.format(column="outcome")} AS latest_outcome,
           {LATEST_OUTCOME.format(column="reason")} AS latest_reason,
           datetime(r.opened_at, 'unixepoch') AS opened,
           CAST(strftime('%s', 'now') - r.opened_at AS INTEGER) AS age_seconds
    FROM rollouts AS r
    """,
    """
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
           datetime(s.frozen_at, 'unixepoch') AS frozen,
           datetime(o.recorded_at, 'unixepoch') AS judged
    FROM build_outcomes AS o
    JOIN snapshots AS s ON s.snapshot_id = o.snapshot_id
    WHERE o.outcome IN ('masked', 'failed')
      AND NOT EXISTS (SELECT 1 FROM build_outcomes AS later
                       WHERE later.snapshot_id = o.snapshot_id
                         AND (later.version, later.outcome_id) > (o.version, o.outcome_id))
    """,
    f"""
    CREATE VIEW lost_calls AS
    SELECT i.rollout_id, i.model_call_id, r.state AS rollout_state,
           (SELECT group_concat(f.reason || iif(f.detail = '', '', ': ' || f.detail), '; ')
              FROM incomplete_flags AS f
             WHERE f.rollout_id = i.rollout_id AND f.model_call_id = i.model_call_id) AS flags,
           datetime(i.begun_at, 'unixepoch') AS begun,
           CAST(strftime('%s', 'now') - i.begun_at AS INTEGER) AS age_seconds,
           {PROCESS}
    FROM call_intents AS i
    LEFT JOIN rollouts AS r ON r.rollout_id = i.rollout_id
    LEFT JOIN writers AS w ON w.writer_id = i.writer_id
    WHERE i.outcome IS NULL
    """,
    f"""
    CREATE VIEW late_calls AS
    SELECT l.rollout_id, l.model_call_id, l.state AS refused_as, r.state AS rollout_state,
           datetime(l.attempted_at, 'unixepoch') AS attempted,
           CAST(l.attempted_at - r.frozen_at AS INTEGER) AS seconds_after_freeze,
           {PROCESS}
    FROM late_writes AS l
    LEFT JOIN rollouts AS r ON r.rollout_id = l.rollout_id
    LEFT JOIN writers AS w ON w.writer_id = l.writer_id
    """,
    """
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
           datetime(e.created_at, 'unixepoch') AS created
    FROM entries AS e
    """,
    # Two small tables of numbers count positions: unlike a recursive counter they let a condition on
    # one call through to its row, and counting rows decodes nothing. The innermost LIMIT keeps SQLite
    # from writing the expression for its four bytes out four times, which would read the blob as often.
    f"""
    CREATE VIEW call_tokens AS
    SELECT rollout_id, model_call_id, iif(at < suffix, 'prompt', 'generation') AS part,
           prefix_length + at AS position,
           (SELECT {TOKEN_ID} FROM (
                SELECT iif(at < suffix,
                           substr(prompt_suffix, 4 * at + 1, 4),
                           substr(generation, 4 * (at - suffix) + 1, 4)) AS four LIMIT 1)) AS token_id
    FROM (
        SELECT e.rollout_id, e.model_call_id, e.prefix_length, e.prompt_suffix, e.generation,
               e.prompt_length - e.prefix_length AS suffix,
               a.n * 1024 + b.n AS at
        FROM entries AS e
        CROSS JOIN numbers AS a ON a.n <= (e.sequence_length - e.prefix_length - 1) / 1024
        CROSS JOIN numbers AS b ON a.n * 1024 + b.n < e.sequence_length - e.prefix_length
    )
    """,
]


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)
    op.execute(
        "WITH RECURSIVE counter(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM counter WHERE n < 1023) "
        "INSERT INTO numbers (n) SELECT n FROM counter"
    )
    for table in SNAPSHOT_TABLES:
        op.execute(IMMUTABLE.format(table=table))
        op.execute(EVIDENCE.format(table=table))
        op.execute(SEALED.format(table=table))
    for statement in AUDIT_TRAIL + VIEWS:
        op.execute(statement)
