"""What a sink and a source of captured tokens promise. Promises only; ``store`` keeps them.

A *sink* takes records while a rollout runs, in the process that serves the model. A *source* gives
the finished rollout back, in the process that trains or prepares the data. ``TokenCaptureStore`` is
both. A framework with a transport of its own installs its own; the suite in
``token_id_capture.testing.contract`` tells whether it keeps these promises.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, Final, Protocol, TypeGuard, TypeVar, runtime_checkable

from token_id_capture.lifecycle import CallOrigin, Flag
from token_id_capture.provenance import HistoryLink, KnownCall, StoredAnswer
from token_id_capture.records import TokenEntry
from token_id_capture.tokens import TokenIds

_Extension = TypeVar("_Extension")

SINK_METHODS: Final = ("put", "mark_incomplete", "close")
SOURCE_METHODS: Final = ("freeze", "drop", "close")


@dataclass(frozen=True)
class TokenCaptureSnapshot:
    """One frozen, immutable state of a rollout.

    ``entries`` are in the order in which they were stored. ``incomplete`` is true if any call was
    flagged or was begun and never ended. ``snapshot_id`` and ``version`` name exactly this state;
    an empty ``snapshot_id`` is the snapshot of a rollout that nobody has seen, and retires nothing.
    ``flags`` say whose calls are missing, calls that never ended among them; an incomplete snapshot
    without them may lack a call of any agent.
    """

    rollout_id: str
    entries: tuple[TokenEntry, ...]
    incomplete: bool
    snapshot_id: str
    version: int
    flags: tuple[Flag, ...] = ()


@runtime_checkable
class TokenSink(Protocol):
    """Takes the records of running rollouts."""

    async def put(self, entry: TokenEntry) -> None:
        """Store one call. When this returns, the entry is durable and visible to every process.

        The same call with the same payload again is a no-op, also after a freeze.

        Raises:
            ConflictingEntryError: the call id is known with another payload; the flag is durable.
            RolloutFrozenError: the rollout was frozen; its snapshot is unchanged.
            RolloutRetiredError: the rollout was retired.
            StorageFullError: there is no room; nothing of the entry is stored.
        """
        ...

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "", reason: str = "") -> None:
        """Record durably that something of this rollout is missing. Works after a freeze too.

        ``reason`` is one of ``token_id_capture.reasons``, alone or followed by ``": "`` and
        particulars. Every mark raises the version, so a snapshot taken before it no longer retires.

        Raises:
            RolloutRetiredError: the rollout was retired.
        """
        ...

    async def close(self) -> None:
        """Release everything. Idempotent. Nothing that was acknowledged is lost."""
        ...


@runtime_checkable
class BeginsCalls(Protocol):
    """Optional extension of a sink: the intent of a call is recorded before it is dispatched."""

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Record durably that a call is about to be dispatched. ``put`` ends it.

        An intent that is still open at the freeze makes the snapshot incomplete.

        Raises:
            RolloutFrozenError, RolloutRetiredError: no call may start any more.
        """
        ...


@runtime_checkable
class CallIntents(BeginsCalls, Protocol):
    """The same, where an intent can also end without a call."""

    async def refuse_call(self, rollout_id: str, model_call_id: str, detail: str = "") -> None:
        """End an intent whose call the engine refused before it generated anything: nothing is missing.

        Unknown intents and intents that ended already are left as they are.
        """
        ...


@runtime_checkable
class RemembersHistories(Protocol):
    """Optional extension of a sink, without which there is no ``--continuity``: open rollouts can be asked
    which of their calls a request continues."""

    async def put(self, entry: TokenEntry, history: HistoryLink | None = None) -> None:
        """``put`` of ``TokenSink``; with ``history`` the entry can be found again, from when it is durable."""
        ...

    async def find_calls(self, rollout_id: str, chains: Sequence[bytes]) -> list[KnownCall]:
        """The calls of an open rollout that were stored under one of these chains, by any process."""
        ...

    async def sequence_of(self, rollout_id: str, model_call_id: str) -> TokenIds | None:
        """The prompt and generation of a stored call; None if there is none.

        Raises:
            CorruptCaptureError: stored tokens do not match their digest.
        """
        ...


@runtime_checkable
class RemembersAnswers(Protocol):
    """Optional extension of a sink, without which no history is restored: calls of open rollouts can be read."""

    async def answers_since(self, rollout_id: str, order: int) -> list[StoredAnswer]:
        """The assistant messages of the rollout's calls that were stored after ``order``, by any process."""
        ...


@runtime_checkable
class AttributedCalls(Protocol):
    """Optional extension of a sink with call intents: it is told whose call begins.

    A call that is lost then costs no other agent's sequence.
    """

    async def begin_attributed_call(self, rollout_id: str, model_call_id: str, origin: CallOrigin) -> None:
        """As ``begin_call``, in its place; flags of the call are stored with ``origin`` too."""
        ...


@runtime_checkable
class TokenSource(Protocol):
    """Gives finished rollouts back."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Close the rollout for writing and return its one snapshot.

        Idempotent: the same ``snapshot_id`` and ``version`` until a mark lands; after one, the same
        ``snapshot_id`` with a higher version and ``incomplete=True``. Every entry acknowledged
        before the call is in it. A rollout that nobody has seen gives an empty snapshot that is not
        incomplete, and leaves no tombstone.

        Raises:
            RolloutRetiredError: the rollout was retired.
            CorruptCaptureError: stored tokens do not match their digest; the message names the call.
        """
        ...

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Delete the rollout if exactly this snapshot is its latest state; else return False.

        False also while the latest recorded outcome of the snapshot is masked or failed. Repeating
        a drop that succeeded returns True. A tombstone of the retired id refuses late writers.
        """
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


@runtime_checkable
class OutcomeRecorder(Protocol):
    """Optional extension of a source: a consumer says what became of a snapshot."""

    async def record_outcome(
        self,
        snapshot_id: str,
        version: int,
        outcome: str,
        reason: str = "",
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Append an outcome: ``delivered``, ``masked`` or ``failed``. It outlives the snapshot.

        The latest outcome on the newest version counts: one that comes late, on an older version,
        neither lets the rollout be dropped nor keeps it.
        The same outcome as the latest one of this snapshot and version is not appended again.

        Raises:
            ValueError: an unknown outcome.
            UnknownRolloutError: no snapshot has this id and version.
        """
        ...


_installed_sink: TokenSink | None = None
_installed_source: TokenSource | None = None


def install_token_sink(sink: TokenSink | None) -> None:
    """Use this sink in the current process where no other is configured; None uninstalls it.

    A sink that a launcher installs does not reach the workers that it spawns.

    Raises:
        TypeError: it lacks a method of ``TokenSink``, or its ``mark_incomplete`` takes other arguments.
    """
    global _installed_sink
    _require(sink, SINK_METHODS, "token sink")
    if sink is not None:
        mark_of(sink)  # refused here, not when the first mark is lost
    _installed_sink = sink


def installed_token_sink() -> TokenSink | None:
    """The sink of ``install_token_sink`` in this process."""
    return _installed_sink


def install_token_source(source: TokenSource | None) -> None:
    """Use this source in the current process where no other is configured; None uninstalls it.

    Raises:
        TypeError: it lacks a method of ``TokenSource``.
    """
    global _installed_source
    _require(source, SOURCE_METHODS, "token source")
    _installed_source = source


def installed_token_source() -> TokenSource | None:
    """The source of ``install_token_source`` in this process."""
    return _installed_source


def mark_of(sink: TokenSink) -> Callable[[str, str, str], Awaitable[None]]:
    """``sink.mark_incomplete``, called with a rollout id, a call id and a reason as it takes them.

    Sinks that were written for NeMo Gym take no reason; theirs is left out, so that no mark is lost.

    Raises:
        TypeError: it takes neither.
    """
    mark = sink.mark_incomplete
    if _takes(mark, 3):
        return mark
    if not _takes(mark, 2):
        named = type(sink).__name__
        raise TypeError(f"{named}.mark_incomplete must take a rollout id, a call id and a reason: {signature(mark)}")

    async def without_reason(rollout_id: str, model_call_id: str, reason: str) -> None:
        await mark(rollout_id, model_call_id)

    return without_reason


def _takes(function: Callable[..., Any], count: int) -> bool:
    plain = getattr(function, "__func__", function)
    return _binds(plain, count if plain is function else count + 1)


@lru_cache(maxsize=256)
def _binds(function: Callable[..., Any], count: int) -> bool:
    try:
        signature(function).bind(*[""] * count)
    except TypeError:
        return False
    return True


def offers(candidate: object, extension: Callable[..., _Extension]) -> TypeGuard[_Extension]:
    """Whether a sink, a source or an engine has everything that an optional extension, a protocol, declares."""
    return not missing_methods(candidate, _declared_by(extension))


@lru_cache(maxsize=64)
def _declared_by(extension: type) -> tuple[str, ...]:
    return tuple(name for kind in extension.__mro__[:-1] for name in vars(kind) if not name.startswith("_"))


def missing_methods(candidate: object, methods: tuple[str, ...]) -> list[str]:
    """Those of ``methods`` that ``candidate`` lacks or that cannot be called."""
    return [method for method in methods if not callable(getattr(candidate, method, None))]


def _require(candidate: object | None, methods: tuple[str, ...], role: str) -> None:
    if candidate is None:
        return
    missing = missing_methods(candidate, methods)
    if missing:
        raise TypeError(f"{type(candidate).__name__} is no {role}: it lacks {', '.join(missing)}")
