"""What a setting is where nobody set it.

A module that imports nothing, as ``tokcap --help`` shows these too. ``GatewaySettings`` has the rest.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Streaming: TypeAlias = Literal["auto", "always", "never"]
"""Whether the engine is asked for a stream where the client wants one: ``auto`` leaves it to the engine adapter."""

InlineSystemSetting: TypeAlias = Literal["auto", "keep", "user", "merge"]
"""What becomes of a system message behind others: ``auto`` asks the engine whether its template takes one."""

HistorySetting: TypeAlias = Literal["exact", "full", "off"]
"""How far the history of a client is put back as the policy sampled it."""

INLINE_SYSTEM: Final = "auto"
HISTORY: Final = "exact"
CHAT_HISTORY: Final = "off"
Continuity: TypeAlias = Literal["off", "template", "exact"]
"""The names of ``provenance.Policy``."""

ENGINE: Final = "auto"
CONTINUITY: Final = "off"
STREAMING: Final = "auto"
MAX_CONCURRENT_CALLS: Final = 4096

ADMIN: Final = "/admin"
"""Below it is what an operator or a trainer asks and changes."""

HAND_OFF: Final = "/hand-off"
"""Below it finished rollouts are handed off."""
