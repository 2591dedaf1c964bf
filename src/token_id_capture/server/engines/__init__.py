"""The engines that the gateway knows, and those that others bring, by the name that ``--engine`` takes.

A name is one of ``ENGINES``, one that an installed package registered under the entry point group
``token_id_capture.engines``, or ``module:Class``. Whatever it names is called without arguments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final

from token_id_capture.errors import ConfigurationError
from token_id_capture.protocols import missing_methods
from token_id_capture.server.engines.auto import AutoEngine
from token_id_capture.server.engines.base import ENGINE_METHODS, Engine
from token_id_capture.server.engines.llama_cpp import LlamaCppEngine
from token_id_capture.server.engines.message import MessageEngine
from token_id_capture.server.engines.sglang import SglangEngine
from token_id_capture.server.engines.vllm import VllmEngine

ENTRY_POINT_GROUP: Final = "token_id_capture.engines"

# vLLM's shape last: servers of all kinds took over parts of it, the others have names of their own.
ENGINES: Final[dict[str, Callable[[], Engine]]] = {
    "auto": lambda: AutoEngine([MessageEngine(), SglangEngine(), LlamaCppEngine(), VllmEngine()]),
    "llama-cpp": LlamaCppEngine,
    "message": MessageEngine,
    "sglang": SglangEngine,
    "vllm": VllmEngine,
}


def make_engine(name: str) -> Engine:
    """The engine of this name.

    Raises:
        ConfigurationError: there is none, or what the name stands for cannot be loaded or is not an engine.
    """
    if name in ENGINES:
        return ENGINES[name]()
    registered = entry_points(group=ENTRY_POINT_GROUP)
    if ":" not in name and name not in registered.names:
        known = ", ".join(sorted({*ENGINES, *registered.names}))
        raise ConfigurationError(f"unknown engine {name!r}: choose one of {known}, or name a class as module:Class")
    try:
        engine: Engine = _class(name)() if ":" in name else registered[name].load()()
    except Exception as error:
        raise ConfigurationError(f"engine {name!r} could not be loaded: {type(error).__name__}: {error}") from error
    missing = [*missing_methods(engine, ENGINE_METHODS), *(() if hasattr(engine, "paths") else ("paths",))]
    if missing:
        raise ConfigurationError(f"{name!r} is not an engine: it lacks {', '.join(missing)}")
    return engine


def _class(target: str) -> Any:
    module, _, attribute = target.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a script of one's own, named from where it lies
    return getattr(import_module(module), attribute)
