"""The engines that the gateway knows, by the name that ``--engine`` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from token_id_capture.errors import ConfigurationError
from token_id_capture.server.engines.auto import AutoEngine
from token_id_capture.server.engines.base import Engine
from token_id_capture.server.engines.message import MessageEngine
from token_id_capture.server.engines.vllm import VllmEngine

# The message shape first: its arrays have names of their own, so it is never found by mistake.
ENGINES: Final[dict[str, Callable[[], Engine]]] = {
    "auto": lambda: AutoEngine([MessageEngine(), VllmEngine()]),
    "message": MessageEngine,
    "vllm": VllmEngine,
}


def make_engine(name: str) -> Engine:
    """The engine of this name.

    Raises:
        ConfigurationError: there is none; the message lists those that there are.
    """
    if name not in ENGINES:
        raise ConfigurationError(f"unknown engine {name!r}: choose one of {', '.join(sorted(ENGINES))}")
    return ENGINES[name]()
