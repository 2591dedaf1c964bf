"""The two databases of a copy, whatever they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from token_id_capture.store.copying.parts import Part, Row, Rows


class Side(Protocol):
    """Either of the two. As text it is the name of the database, for people."""

    def identity(self) -> object:
        """What no other database has."""
        ...


class Source(Side, Protocol):
    """A database that rollouts are read from."""

    def count(self) -> int:
        """About how many rollouts there are."""
        ...

    def page(self, after: str, limit: int) -> list[tuple[str, int]]:
        """The next ids behind ``after`` in their order, each with the number of its calls.

        Also ids of which only outcomes or late writes are left.
        """
        ...

    def listed(self, rollout_ids: Sequence[str]) -> list[tuple[str, int]]:
        """The same for these ids, those included of which there is nothing."""
        ...

    def state(self) -> AbstractContextManager[Rows]:
        """One state of the database, for as long as the block lasts.

        Reading it raises ``LeftOutError`` where rows cannot be read.
        """
        ...


class WritableRows(Rows, Protocol):
    """Rows inside a transaction that writes."""

    def insert(self, part: Part, rows: Iterable[Row]) -> None:
        """Add rows of ``part.columns``, taking them one at a time.

        Raises:
            LeftOutError: a row cannot be stored in this database.
        """
        ...


class Target(Side, Protocol):
    """A database that rollouts are written to."""

    def transaction(self) -> AbstractContextManager[WritableRows]:
        """A transaction that is durable when the block ends, and leaves nothing behind if an error ends it.

        Raises:
            TryAgainError: others were in its way, and the same transaction may succeed now.
        """
        ...
