"""What tells one file, and one use of a rollout id, from another is an identity and not a time.

The file gets an identity of its own, and the overview finds a rollout's outcome by its snapshot. A
rollout that was retired by hand keeps its snapshot's id for that; its version is raised instead, so
that a drop of the version that was retired still fails.

Revision ID: 0003
Revises: 0002
"""

from alembic import op
from sqlalchemy import text

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BY_TIME = "o.rollout_id = r.rollout_id AND o.recorded_at >= r.opened_at"
BY_SNAPSHOT = "o.snapshot_id = r.snapshot_id"


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE capture_file (
            file_id TEXT NOT NULL,
            made_at REAL NOT NULL,
            copied_from TEXT,
            PRIMARY KEY (file_id)
        ) STRICT
        """
    )
    op.execute(
        "INSERT INTO capture_file (file_id, made_at) "
        "VALUES (lower(hex(randomblob(16))), (julianday('now') - 2440587.5) * 86400.0)"
    )
    # Which outcomes are of this use of the id, only the clock can say of what is in the file already.
    op.execute(
        f"""
        UPDATE rollouts AS r SET version = version + 1, snapshot_id = (
            SELECT o.snapshot_id FROM build_outcomes AS o WHERE {BY_TIME} ORDER BY o.outcome_id DESC LIMIT 1)
        WHERE state = 'retired' AND snapshot_id IS NULL
        """
    )
    connection = op.get_bind()
    overview = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = 'rollout_overview'")).scalar_one()
    op.execute("DROP VIEW rollout_overview")
    connection.exec_driver_sql(overview.replace(BY_TIME, BY_SNAPSHOT))
