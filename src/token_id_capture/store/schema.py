"""The tables: one source for the statements of this package and for alembic's comparison.

Views and triggers are written out in the migrations, where they are frozen per revision; a test
proves that migrating a new file gives exactly these tables.

Times are seconds since the epoch. Lengths and positions count tokens. Token ids are four bytes
each (unsigned, little-endian) and log probabilities eight (double, little-endian).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import (
    BLOB,
    INTEGER,
    REAL,
    TEXT,
    CheckConstraint,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    Table,
    text,
)

from token_id_capture.lifecycle import IntentOutcome, Outcome, State
from token_id_capture.store.outcome_order import FORBIDS_TRAINING

metadata = MetaData()

_RECORDED: Final = [outcome for outcome in Outcome if outcome is not Outcome.DELIVERABLE]


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"'{word}'" for word in words)


def _entry_columns() -> list[Column[Any]]:
    """The columns that an entry has in ``entries`` and, copied, in ``snapshot_entries``."""
    return [
        Column("payload_digest", BLOB, nullable=False, comment="sha256 of the whole canonical record"),
        Column("sequence_digest", BLOB, nullable=False, comment="sha256 of the prompt ids and generation ids"),
        Column("prefix_call_id", TEXT, comment="the earlier call that the prompt continues, token for token"),
        Column("prefix_length", INTEGER, nullable=False, comment="how many prompt tokens that call accounts for"),
        Column("prompt_length", INTEGER, nullable=False, comment="tokens of the whole prompt"),
        Column("generation_length", INTEGER, nullable=False, comment="sampled tokens"),
        Column("sequence_length", INTEGER, nullable=False, comment="prompt_length + generation_length"),
        Column("schema_version", INTEGER, nullable=False, comment="TokenEntry.schema_version"),
        Column("model", TEXT, nullable=False, comment="the model that the engine or the request named"),
        Column("finish_reason", TEXT, comment="why the generation ended, as the engine said"),
        Column("created_at", REAL, nullable=False, comment="when the record was made"),
        Column("stored_at", REAL, nullable=False, comment="when the record was committed"),
        Column("writer_id", TEXT, nullable=False, comment="the process that stored it"),
        Column("content", TEXT, nullable=False, comment="JSON: output_items and token_item_index"),
        Column("extras", TEXT, nullable=False, comment="JSON: all other fields of the record"),
        Column("prompt_suffix", BLOB, nullable=False, comment="the prompt ids after prefix_length"),
        Column("generation", BLOB, nullable=False, comment="the sampled ids"),
        Column("log_probs", BLOB, nullable=False, comment="one log probability a sampled id"),
        Column("routed_experts", BLOB, comment="opaque, zlib-compressed JSON"),
        *_origin_columns(),
        Column("upstream", TEXT, comment="the address of the engine that served the call; null if nobody told"),
        Column("begun_at", REAL, comment="when its intent was recorded; null if the process that stored it did not"),
    ]


def _origin_columns() -> list[Column[Any]]:
    """Whose call it is; null where the harness does not tell."""
    return [
        Column("agent", TEXT, comment="main, or the harness's id of a sub-agent"),
        Column("parent_agent", TEXT, comment="the agent that started this one"),
        Column(
            "purpose",
            TEXT,
            CheckConstraint("purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm')"),
            comment="what the harness says that the call is for",
        ),
        Column("offers_tools", INTEGER, CheckConstraint("offers_tools IN (0, 1)"), comment="whether the request did"),
    ]


def _session_headers() -> Column[Any]:
    return Column("session_headers", TEXT, comment="JSON: the request's session headers by name; null without any")


def _entry_checks() -> list[CheckConstraint]:
    return [
        CheckConstraint("length(prompt_suffix) = 4 * (prompt_length - prefix_length)"),
        CheckConstraint("length(generation) = 4 * generation_length"),
        CheckConstraint("length(log_probs) = 8 * generation_length"),
        CheckConstraint("sequence_length = prompt_length + generation_length"),
        CheckConstraint("(prefix_call_id IS NULL) = (prefix_length = 0)"),
    ]


def _of_snapshot() -> ForeignKeyConstraint:
    # Deferred, because the copies are inserted before the snapshot: once its row exists, a trigger
    # lets no further copy in.
    return ForeignKeyConstraint(
        ["snapshot_id", "version"],
        ["snapshots.snapshot_id", "snapshots.version"],
        deferrable=True,
        initially="DEFERRED",
    )


writers = Table(
    "writers",
    metadata,
    Column("writer_id", TEXT, primary_key=True, nullable=False),
    Column("pid", INTEGER, nullable=False),
    Column("host", TEXT, nullable=False),
    Column("boot_id", TEXT, nullable=False, comment="the boot, pid namespace and clock tick of its start"),
    Column("started_at", REAL, nullable=False),
    Column("last_seen_at", REAL, nullable=False, comment="its latest commit, to within some seconds"),
    sqlite_strict=True,
)

capture_file = Table(
    "capture_file",
    metadata,
    Column("file_id", TEXT, primary_key=True, nullable=False, comment="tells this file from others and from copies"),
    Column("made_at", REAL, nullable=False),
    Column("copied_from", TEXT, comment="the file_id of the database that this is a backup of"),
    sqlite_strict=True,
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("rollout_id", TEXT, primary_key=True, nullable=False),
    Column("incarnation", TEXT, nullable=False, comment="new whenever the id is used again after a delete"),
    Column("state", TEXT, CheckConstraint(f"state IN ({_listed(State)})"), nullable=False),
    Column("version", INTEGER, nullable=False, comment="raised by every freeze and every mark"),
    Column("snapshot_id", TEXT, comment="of the frozen rollout; kept after its retirement, for its outcomes"),
    Column("opened_at", REAL, nullable=False),
    Column("frozen_at", REAL),
    Column("retired_at", REAL),
    Index("rollouts_by_state", "state", "rollout_id"),
    Index("rollouts_by_retirement", "retired_at", sqlite_where=text(f"state = '{State.RETIRED}'")),
    sqlite_strict=True,
)

entries = Table(
    "entries",
    metadata,
    Column("rollout_id", TEXT, ForeignKey("rollouts.rollout_id"), primary_key=True, nullable=False),
    Column("model_call_id", TEXT, primary_key=True, nullable=False),
    *_entry_columns(),
    *_entry_checks(),
    # The last two let summaries of a rollout be read from the index: rows are wide, and each lies on
    # a page of its own.
    Index("entries_by_length", "rollout_id", "sequence_length", "generation_length", "model", "agent"),
    sqlite_strict=True,
)

call_intents = Table(
    "call_intents",
    metadata,
    Column("rollout_id", TEXT, ForeignKey("rollouts.rollout_id"), primary_key=True, nullable=False),
    Column("model_call_id", TEXT, primary_key=True, nullable=False),
    Column("writer_id", TEXT, ForeignKey("writers.writer_id"), nullable=False),
    Column("begun_at", REAL, nullable=False),
    Column(
        "outcome",
        TEXT,
        CheckConstraint(f"outcome IN ({_listed(IntentOutcome)})"),
        comment="null while the call is open",
    ),
    Column("detail", TEXT, nullable=False, comment="what the engine said when it refused"),
    *_origin_columns(),
    _session_headers(),
    sqlite_strict=True,
)

call_histories = Table(
    "call_histories",
    metadata,
    Column("rollout_id", TEXT, ForeignKey("rollouts.rollout_id"), primary_key=True, nullable=False),
    Column("chain", BLOB, primary_key=True, nullable=False, comment="hash of the conversation up to the call's answer"),
    Column("model_call_id", TEXT, primary_key=True, nullable=False),
    Column("reasoning", BLOB, nullable=False, comment="digest of the answer's reasoning; empty if it has none"),
    Column("call_ids", BLOB, nullable=False, comment="digest of the ids of its tool calls; empty if it has none"),
    Column("ended", INTEGER, CheckConstraint("ended IN (0, 1)"), nullable=False, comment="0: the policy was cut off"),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)

incomplete_flags = Table(
    "incomplete_flags",
    metadata,
    Column("flag_id", INTEGER, primary_key=True, nullable=False),
    Column("rollout_id", TEXT, ForeignKey("rollouts.rollout_id"), nullable=False),
    Column("model_call_id", TEXT, nullable=False, comment="empty if the flag concerns no single call"),
    Column("reason", TEXT, nullable=False, comment="a code; the package's reasons module explains each"),
    Column("detail", TEXT, nullable=False, comment="particulars, for people"),
    Column("flagged_at", REAL, nullable=False),
    *_origin_columns(),
    _session_headers(),
    Index("incomplete_flags_by_rollout", "rollout_id"),
    sqlite_strict=True,
)

late_writes = Table(
    "late_writes",
    metadata,
    Column("rollout_id", TEXT, primary_key=True, nullable=False),
    Column("model_call_id", TEXT, primary_key=True, nullable=False),
    Column("state", TEXT, nullable=False, comment="the state that refused it: frozen or retired"),
    Column("payload_digest", BLOB, nullable=False, comment="sha256 of the record that was refused"),
    Column("writer_id", TEXT, nullable=False, comment="the process that tried"),
    Column("attempted_at", REAL, nullable=False),
    sqlite_strict=True,
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("snapshot_id", TEXT, primary_key=True, nullable=False),
    Column("version", INTEGER, primary_key=True, nullable=False),
    Column("rollout_id", TEXT, ForeignKey("rollouts.rollout_id"), nullable=False),
    Column("incomplete", INTEGER, CheckConstraint("incomplete IN (0, 1)"), nullable=False),
    Column("entry_count", INTEGER, nullable=False),
    Column("frozen_at", REAL, nullable=False),
    Index("snapshots_by_rollout", "rollout_id"),
    sqlite_strict=True,
)

snapshot_entries = Table(
    "snapshot_entries",
    metadata,
    Column("snapshot_id", TEXT, primary_key=True, nullable=False),
    Column("version", INTEGER, primary_key=True, nullable=False),
    Column("model_call_id", TEXT, primary_key=True, nullable=False),
    *_entry_columns(),
    *_entry_checks(),
    _of_snapshot(),
    sqlite_strict=True,
)

snapshot_flags = Table(
    "snapshot_flags",
    metadata,
    Column("snapshot_flag_id", INTEGER, primary_key=True, nullable=False),
    Column("snapshot_id", TEXT, nullable=False),
    Column("version", INTEGER, nullable=False),
    Column("model_call_id", TEXT, nullable=False),
    Column("reason", TEXT, nullable=False, comment="a flag's reason, or call_lost for an intent still open"),
    Column("detail", TEXT, nullable=False),
    Column("flagged_at", REAL, nullable=False),
    *_origin_columns(),
    _session_headers(),
    _of_snapshot(),
    Index("snapshot_flags_by_snapshot", "snapshot_id", "version"),
    sqlite_strict=True,
)

build_outcomes = Table(
    "build_outcomes",
    metadata,
    Column("outcome_id", INTEGER, primary_key=True, nullable=False),
    Column("snapshot_id", TEXT, nullable=False),
    Column("version", INTEGER, nullable=False),
    Column("rollout_id", TEXT, nullable=False),
    Column(
        "outcome",
        TEXT,
        CheckConstraint(f"outcome IN ({_listed(_RECORDED)})"),
        nullable=False,
        comment="released: an administrator let the evidence go",
    ),
    Column("reason", TEXT, nullable=False, comment="a code; the package's reasons module explains each"),
    Column("metrics", TEXT, nullable=False, comment="JSON: what the build kept and dropped"),
    Column("recorded_at", REAL, nullable=False),
    Index("build_outcomes_by_snapshot", "snapshot_id", "version"),
    Index("build_outcomes_by_rollout", "rollout_id", "version"),
    Index("build_outcomes_masked", "rollout_id", "snapshot_id", sqlite_where=text(FORBIDS_TRAINING)),
    sqlite_strict=True,
)

numbers = Table(
    "numbers",
    metadata,
    Column("n", INTEGER, primary_key=True, nullable=False, comment="0 to 1023; the view call_tokens counts with it"),
    sqlite_strict=True,
)

ENTRY_COLUMNS: Final = tuple(column.name for column in entries.columns if column.name != "rollout_id")
"""What ``entries`` and ``snapshot_entries`` have in common, in order."""
