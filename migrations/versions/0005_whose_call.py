"""Whose call it is: agent, parent, purpose and whether tools were offered, of entries, intents and flags.

Revision ID: 0005
Revises: 0004
"""

from alembic import op
from sqlalchemy import text

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TABLES = ("entries", "snapshot_entries", "call_intents", "incomplete_flags", "snapshot_flags")

# The row of a call is wide, and what is added to a table lies behind all else: summaries read the index.
INDEX = [
    "DROP INDEX entries_by_length",
    "CREATE INDEX entries_by_length ON entries (rollout_id, sequence_length, generation_length, model, agent)",
]


# Where the views say it: behind which words of theirs, and how.
ORIGIN = "{row}.agent, {row}.parent_agent, {row}.purpose, {row}.offers_tools,"
VIEWS = {
    "rollout_overview": (
        "AS open_calls,",
        """
           iif(r.state = 'retired', NULL,
               (SELECT count(DISTINCT coalesce(e.agent, 'main')) FROM entries AS e
                 WHERE e.rollout_id = r.rollout_id)) AS agents,""",
    ),
    "lost_calls": ("i.model_call_id,", f" {ORIGIN.format(row='i')}"),
    "call_chain": ("e.finish_reason,", f"\n           {ORIGIN.format(row='e')}"),
}


def upgrade() -> None:
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} ADD COLUMN agent TEXT")
        op.execute(f"ALTER TABLE {table} ADD COLUMN parent_agent TEXT")
        op.execute(
            f"ALTER TABLE {table} ADD COLUMN purpose TEXT "
            "CHECK (purpose IN ('turn', 'auxiliary', 'compaction', 'prewarm'))"
        )
        op.execute(f"ALTER TABLE {table} ADD COLUMN offers_tools INTEGER CHECK (offers_tools IN (0, 1))")
    for statement in INDEX:
        op.execute(statement)
    connection = op.get_bind()
    for name, (behind, more) in VIEWS.items():
        view = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = :name"), {"name": name}).scalar_one()
        op.execute(f"DROP VIEW {name}")
        connection.exec_driver_sql(view.replace(behind, behind + more, 1))
