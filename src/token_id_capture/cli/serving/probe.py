"""A check of an engine, as ``tokcap check`` and the start of a server make it, and what it found in words."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from token_id_capture.cli.serving.keys import read_key

if TYPE_CHECKING:
    from token_id_capture.server.check.check import CheckResult, ModeResult
    from token_id_capture.server.defaults import Streaming

SAID: Final = {"captured": "exact", "not_captured": "not captured", "refused": "not served", "failed": "failed"}


async def checked(
    upstream: str,
    engine: str,
    streaming: Streaming,
    tokenize_prompts: bool,
    key_file: Path | None,
    seconds: float,
    continuity: bool = True,
) -> CheckResult:
    """Check the engine at this address, with ``continuity`` also whether it takes prompts as ids.

    Raises:
        ConfigurationError: the address, the engine or the key cannot be used.
    """
    from token_id_capture.server.check.check import check_engine
    from token_id_capture.server.http.upstream import Upstream
    from token_id_capture.server.settings import GatewaySettings

    # Why something is not captured is what the check tells.
    logging.getLogger("token_id_capture").addHandler(logging.NullHandler())
    key = None if key_file is None else read_key(str(key_file))
    connections = Upstream(upstream, read_timeout=seconds, api_key=key, keep_alive=False)
    settings = GatewaySettings(streaming=streaming, tokenize_prompts=tokenize_prompts)
    try:
        return await check_engine(connections, engine, settings, seconds=seconds, continuity=continuity)
    finally:
        await connections.close()


def continuity_of(result: CheckResult) -> str:
    """Which policies of ``--continuity`` work with the engine."""
    if result.continuity is None:
        return "not tried"
    works = " and ".join(result.continuity.policies)
    return "; ".join(filter(None, (works or "not with this engine", result.continuity.problem)))


def told(modes: Iterable[ModeResult]) -> list[str]:
    """The modes that are not captured, those of one cause together, each with the cause and what to change."""
    causes: dict[str, list[str]] = {}
    for mode in modes:
        why = ": ".join(part for part in (mode.reason, mode.detail) if part)
        cause = f"{SAID[mode.outcome]} ({why})" + (f"; {mode.advice}" if mode.advice else "")
        causes.setdefault(cause, []).append(mode.mode)
    return [f"{' / '.join(names)}: {cause}" for cause, names in causes.items()]
