"""Fields of rollout records, kept on disk until the rollout that they belong to is exported.

Records come in the order in which rollouts finished, and rollouts leave in the order of their ids.
A private temporary database (SQLite deletes it by itself) joins the two in flat memory.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from token_id_capture.builder.attribution import ScoredAnswer
from token_id_capture.integrations.nemo_gym import scored_answer
from token_id_capture.outputs.columns import Column, Kind
from token_id_capture.outputs.shapes import Shape


class RecordFields:
    """The named fields of each record. A dot in a name leads into an object, as in ``verifier.reward``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._shapes = {name: Shape() for name in names}
        self._seen: set[str] = set()
        # An empty name is a temporary database on disk, of which only a part is in memory.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA cache_size = -4096")
        self._database.execute(
            "CREATE TABLE records (rollout_id TEXT PRIMARY KEY, found BLOB, scored TEXT) WITHOUT ROWID"
        )
        self._database.execute("BEGIN")

    def add(self, rollout_id: str, record: Mapping[str, Any]) -> None:
        """Keep the fields of a record. A field that is not there is null.

        Raises:
            ValueError: there was a record of this rollout already, or a value is no JSON that every
                reader agrees on (an integer beyond 64 bits, text that is no Unicode).
        """
        found = [self._look_up(record, name) for name in self._names]
        # Not with orjson, which refuses numbers and texts that a record may hold.
        scored = json.dumps(vars(scored_answer(record)), default=str)
        try:
            packed = orjson.dumps(found)
        except TypeError as error:
            raise ValueError(f"a field of rollout {rollout_id!r} cannot be exported: {error}") from error
        try:
            self._database.execute("INSERT INTO records VALUES (?, ?, ?)", (rollout_id, packed, scored))
        except sqlite3.IntegrityError:
            raise ValueError(f"there are two records of rollout {rollout_id!r}") from None
        for name, value in zip(self._names, found, strict=True):
            self._shapes[name].add(value)

    def __contains__(self, rollout_id: str) -> bool:
        """Whether the rollout has a record."""
        return (
            self._database.execute("SELECT 1 FROM records WHERE rollout_id = ?", (rollout_id,)).fetchone() is not None
        )

    def of(self, rollout_id: str) -> dict[str, Any]:
        """The fields of the rollout's record, which there must be."""
        row = self._database.execute("SELECT found FROM records WHERE rollout_id = ?", (rollout_id,)).fetchone()
        return dict(zip(self._names, orjson.loads(row[0]), strict=True))

    def scored(self, rollout_id: str) -> ScoredAnswer | None:
        """What the rollout's record says of the answer that was scored; None if it has no record."""
        row = self._database.execute("SELECT scored FROM records WHERE rollout_id = ?", (rollout_id,)).fetchone()
        if row is None:
            return None
        told = json.loads(row[0])
        return ScoredAnswer(**{**told, "transcript": tuple(told["transcript"])})

    def rollout_ids(self) -> Iterator[str]:
        """The rollouts that have a record."""
        return (row[0] for row in self._database.execute("SELECT rollout_id FROM records ORDER BY rollout_id"))

    def missing(self) -> list[str]:
        """Names that no record had a field of."""
        return [name for name in self._names if name not in self._seen]

    def columns(self) -> tuple[Column, ...]:
        """A column a name, of the type that fits all its values."""
        return tuple(Column(name, Kind.FOUND, "of the rollout's record", shape) for name, shape in self._shapes.items())

    def close(self) -> None:
        """Give the space back."""
        self._database.close()

    def _look_up(self, record: Mapping[str, Any], name: str) -> Any:
        # A field whose own name has a dot in it comes before one inside an object.
        steps = [name] if name in record else name.split(".")
        value: Any = record
        for step in steps:
            if not isinstance(value, Mapping) or step not in value:
                return None
            value = value[step]
        self._seen.add(name)
        return value
