"""The conversations that rollouts sent last, so that of each only the new messages are read."""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any, Final

from token_id_capture.recent import RecentByRollout
from token_id_capture.server.continuity.canonical import History, read_history

_OVERHEAD: Final = 512
"""Bytes of the objects around an answer: of short ones they are the most."""
_WITHOUT_REFERENCES: Final = 2
"""The version of ``marshal`` whose bytes depend on the value alone."""


@dataclass(frozen=True, slots=True)
class _Read:
    """The messages of a conversation, packed, and what was read of them."""

    packed: bytes
    history: History

    @property
    def size(self) -> int:
        return len(self.packed) + _OVERHEAD * (1 + len(self.history.answers))


class KnownHistories:
    """Reads conversations as ``read_history`` does.

    Only what was read before is in it, so it changes how fast a conversation is read and never what it says.
    """

    def __init__(self, capacity: int = 32 * 2**20) -> None:
        """``capacity`` is in bytes."""
        self._recent: RecentByRollout[_Read] = RecentByRollout(attrgetter("size"), capacity)

    @property
    def held(self) -> int:
        """How many bytes are taken."""
        return self._recent.held

    def read(self, rollout_id: str, body: Mapping[str, Any]) -> History:
        """Read the conversation of a chat request.

        Raises:
            NotTextError, UnreadableHistoryError: as for ``read_history``.
        """
        recent = self._recent.of(rollout_id)
        packed = _packed(body.get("messages")) if recent else b""
        history = read_history(body, [one.history for one in recent if packed.startswith(one.packed)])
        # Without an answer it is the first of its rollout, and need not be packed.
        if history.answers and (packed := packed or _packed(body["messages"])):
            self._recent.remember(rollout_id, _Read(packed, history), lambda one: not packed.startswith(one.packed))
        return history


def _packed(messages: Any) -> bytes:
    """The messages in bytes that differ wherever their values or types do; JSON would not tell NaN from null.

    Each ends by itself, so what begins with other messages begins with their bytes. Empty if they cannot be packed.
    """
    try:
        return b"".join(map(marshal.dumps, messages, repeat(_WITHOUT_REFERENCES)))
    except (TypeError, ValueError):
        return b""
