"""When a call was begun, of entries and their copies.

Revision ID: 0009
Revises: 0008
"""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

REAL = {"sqlite": "REAL", "postgresql": "DOUBLE PRECISION"}


def upgrade() -> None:
    kind = REAL[op.get_bind().dialect.name]
    for table in ("entries", "snapshot_entries"):
        op.execute(f"ALTER TABLE {table} ADD COLUMN begun_at {kind}")
