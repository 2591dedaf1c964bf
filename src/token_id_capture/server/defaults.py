"""What a setting is where nobody set it.

A module that imports nothing, as ``tokcap --help`` shows these too. ``GatewaySettings`` has the rest.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Streaming: TypeAlias = Literal["auto", "always", "never"]
"""Whether the engine is asked for a stream where the client wants one: ``auto`` leaves it to the engine adapter."""

ENGINE: Final = "auto"
STREAMING: Final = "auto"
MAX_CONCURRENT_CALLS: Final = 4096
