"""Why sequences of a rollout began anew, in its overview.

Revision ID: 0006
Revises: 0005
"""

from alembic import op
from sqlalchemy import text

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

BEHIND = "AS latest_reason,"
# Older releases of SQLite trust json_each in a view, and json_extract not.
CAUSES = """
           (SELECT group_concat(j.key || ' ' || j.value, ', ') FROM json_each((
               SELECT o.metrics FROM build_outcomes AS o
                WHERE o.snapshot_id = r.snapshot_id
                ORDER BY o.version DESC, o.outcome_id DESC LIMIT 1), '$.causes') AS j) AS latest_causes,"""


def upgrade() -> None:
    connection = op.get_bind()
    view = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = 'rollout_overview'")).scalar_one()
    op.execute("DROP VIEW rollout_overview")
    connection.exec_driver_sql(view.replace(BEHIND, BEHIND + CAUSES, 1))
