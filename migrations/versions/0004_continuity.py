"""Which call a request continues, and how the prompt of each call was made.

``call_histories`` has a row for each call of an open rollout whose answer can be recognised when a later
request restates it. The view of calls tells how their prompts came about.

Revision ID: 0004
Revises: 0003
"""

from alembic import op
from sqlalchemy import text

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# Functions of JSON may not be used in a view where a program does not trust the schema; tables may.
CONTINUITY = """
           (SELECT j.value FROM json_each(e.extras, '$.continuity') AS j
             WHERE j.key IN ('reason', 'mode') AND j.value <> '' ORDER BY j.key DESC LIMIT 1) AS continuity,"""


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE call_histories (
            rollout_id TEXT NOT NULL,
            chain BLOB NOT NULL,
            model_call_id TEXT NOT NULL,
            reasoning BLOB NOT NULL,
            call_ids BLOB NOT NULL,
            ended INTEGER NOT NULL CHECK (ended IN (0, 1)),
            PRIMARY KEY (rollout_id, chain, model_call_id),
            FOREIGN KEY(rollout_id) REFERENCES rollouts (rollout_id)
        ) WITHOUT ROWID, STRICT
        """
    )
    connection = op.get_bind()
    calls = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = 'call_chain'")).scalar_one()
    op.execute("DROP VIEW call_chain")
    connection.exec_driver_sql(calls.replace("e.finish_reason,", f"e.finish_reason,{CONTINUITY}", 1))
