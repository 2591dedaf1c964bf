"""What finished records tell of rollouts that the database does not hold: reward and group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from token_id_capture.records import rollout_id_from_record

_ATTEMPT: Final = re.compile(r"-a\d+$")
_LAST_NUMBER: Final = re.compile(r"-\d+$")


@dataclass(frozen=True, slots=True)
class Told:
    """Of one rollout; None where its record says nothing."""

    reward: float | None
    group: str | None


def told_by(records: Iterable[Mapping[str, Any]]) -> dict[str, Told]:
    """What each record says, by its rollout id; records without one are left out.

    An id is ``_ng_rollout_id`` or what the task and rollout index make, or ``rollout_id`` as in a training row. A
    group is ``group`` or ``_ng_task_index``; else the id says it.

    Raises:
        ValueError: an id is malformed.
    """
    found = {}
    for record in records:
        rollout_id = rollout_id_from_record(record) or record.get("rollout_id")
        if isinstance(rollout_id, str):
            group = next((record[name] for name in ("group", "_ng_task_index") if record.get(name) is not None), None)
            reward = record.get("reward")
            known = float(reward) if isinstance(reward, int | float) else None
            found[rollout_id] = Told(known, None if group is None else str(group))
    return found


def group_of(rollout_id: str) -> str:
    """The task of an id ``TASK-ROLLOUT`` or ``TASK-ROLLOUT-aATTEMPT``; empty for any other."""
    group, found = _LAST_NUMBER.subn("", _ATTEMPT.sub("", rollout_id))
    return group if found else ""
