"""The session headers of calls that were lost, refused or flagged.

Revision ID: 0007
Revises: 0006
"""

from alembic import op
from sqlalchemy import text

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

BEHIND = "i.offers_tools,"


def upgrade() -> None:
    for table in ("call_intents", "incomplete_flags", "snapshot_flags"):
        op.execute(f"ALTER TABLE {table} ADD COLUMN session_headers TEXT")
    connection = op.get_bind()
    view = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = 'lost_calls'")).scalar_one()
    op.execute("DROP VIEW lost_calls")
    connection.exec_driver_sql(view.replace(BEHIND, f"{BEHIND} i.session_headers,", 1))
