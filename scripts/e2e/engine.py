"""What this proof must know of an engine: how to get it, start it, read it off the wire, and ask it to score."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import aiohttp

from e2e.agents import Attempt, Dialect
from e2e.cache import Cache
from e2e.server import Server
from e2e.stories import Act, Kind
from e2e.tap import Exchange
from e2e.witness import Said

MODEL_FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "model"


class Engine(Dialect, Protocol):
    """One engine."""

    name: str
    """What a person calls it."""
    option: str
    """What ``tokcap serve --engine`` calls it."""
    gateway_options: tuple[str, ...]
    """What else ``tokcap serve`` must be told for it."""
    tolerance: float
    """The largest difference of a log probability that different summation orders may make."""
    kinds: tuple[Kind, ...]
    acts: tuple[Act, ...]

    def install(self, cache: Cache) -> None:
        """Make what is needed, if it is not there."""

    def running(self, cache: Cache, logs: Path) -> AbstractAsyncContextManager[Server]:
        """The engine for as long as the block runs."""

    async def said(self, session: aiohttp.ClientSession, url: str, exchange: Exchange) -> Said | None:
        """What a whole response with status 200 says was sampled; None if it does not say all of it."""

    def view_problem(self, attempt: Attempt, exchange: Exchange) -> str | None:
        """How the client's bytes differ from the engine's, except for fields that it did not ask for."""

    async def score(
        self, session: aiohttp.ClientSession, url: str, ids: Sequence[int], mask: Sequence[int]
    ) -> list[float]:
        """The log probability of each id given those before it, computed anew, where ``mask`` is 1; else 0."""

    def reference_differences(self, cache: Cache, rows: Path) -> list[float]:
        """How far the log probabilities of a file of rows are from another implementation's, where there is one."""
