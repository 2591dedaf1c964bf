"""Which engine served a call, of entries and their copies, and in the view call_chain.

Revision ID: 0008
Revises: 0007
"""

from alembic import op
from sqlalchemy import text

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

VIEW = {
    "sqlite": "SELECT sql FROM sqlite_master WHERE name = 'call_chain'",
    "postgresql": "SELECT 'CREATE VIEW call_chain AS ' || pg_get_viewdef('call_chain'::regclass)",
}
TEXT = {"sqlite": "TEXT", "postgresql": 'TEXT COLLATE "C"'}
BEHIND = "e.offers_tools,"


def upgrade() -> None:
    connection = op.get_bind()
    dialect = connection.dialect.name
    for table in ("entries", "snapshot_entries"):
        op.execute(f"ALTER TABLE {table} ADD COLUMN upstream {TEXT[dialect]}")
    view = connection.execute(text(VIEW[dialect])).scalar_one()
    if BEHIND not in view:
        raise RuntimeError(f"the view call_chain has no {BEHIND}")
    op.execute("DROP VIEW call_chain")
    connection.exec_driver_sql(view.replace(BEHIND, f"{BEHIND} e.upstream,", 1))
