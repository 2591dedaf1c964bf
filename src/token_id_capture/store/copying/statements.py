"""Statements that read rollouts, in words of both databases. ``:rollout_ids`` is a JSON list."""

from __future__ import annotations

from typing import Final

from token_id_capture.store.copying.parts import PARTS, WRITERS

AMONG: Final = "IN (SELECT value FROM json_each(:rollout_ids))"

_CALLS: Final = "(SELECT count(*) FROM entries AS e WHERE e.rollout_id = p.rollout_id)"
_IDS: Final = " UNION ".join(
    f"SELECT rollout_id FROM (SELECT DISTINCT rollout_id FROM {table} WHERE rollout_id > :after "
    f"ORDER BY rollout_id LIMIT :limit) AS {table}_ids"
    for table in ("rollouts", "build_outcomes", "late_writes")
)

COUNT: Final = "SELECT count(*) FROM rollouts"
PAGE: Final = f"""
    SELECT p.rollout_id, {_CALLS} FROM ({_IDS} ORDER BY rollout_id LIMIT :limit) AS p ORDER BY p.rollout_id
"""
LISTED: Final = f"""
    SELECT p.rollout_id, {_CALLS} FROM (SELECT value AS rollout_id FROM json_each(:rollout_ids)) AS p
"""
OF_SNAPSHOTS: Final = f"snapshot_id IN (SELECT snapshot_id FROM snapshots WHERE rollout_id {AMONG})"
"""The condition that finds the rows of a table whose snapshots belong to rollouts."""


def of_rollouts(table: str) -> str:
    """The condition that finds the rows of a table in a file."""
    return OF_SNAPSHOTS if table in ("snapshot_entries", "snapshot_flags") else f"rollout_id {AMONG}"


OF_WRITERS: Final = "writer_id IN ({})".format(
    " UNION ".join(
        f"SELECT writer_id FROM {part.table.name} WHERE {of_rollouts(part.table.name)}"
        for part in PARTS
        if part is not WRITERS and "writer_id" in part.columns
    )
)
"""The condition that finds the processes that rows of rollouts name."""
