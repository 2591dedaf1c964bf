"""What an export takes of each rollout: read here, or by several processes in the same order."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeAlias

from token_id_capture.builder.attribution import ScoredAnswer
from token_id_capture.collector import collect_rarely
from token_id_capture.errors import StoreError, TokenCaptureError, UnknownRolloutError
from token_id_capture.export.rows import Row, call_rows, trajectory_rows, why_masked
from token_id_capture.lifecycle import Sequences, State
from token_id_capture.rebuild import build_snapshot
from token_id_capture.store.driver import Connection
from token_id_capture.store.read.evidence import Evidence, read_evidence
from token_id_capture.store.reading import Location, reading

_ROLLOUTS_AT_ONCE: Final = 32
_BATCHES_AHEAD: Final = 2
"""For each process, so that it need not wait, and rows wait in bounded memory."""

Asked: TypeAlias = tuple[str, ScoredAnswer | None]
"""A rollout's id, and the answer that was scored, where a record tells it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows of a rollout are wanted."""

    per_request: bool = False
    states: tuple[State, ...] = (State.FROZEN,)
    sequences: Sequences = Sequences.MAIN
    models: Collection[str] | None = None


@dataclass(slots=True)
class Part:
    """The rows of one rollout. ``masked`` counts what is left out by its reason; ``damage`` says what is unreadable."""

    rollout_id: str
    rows: list[Row] = field(default_factory=list)
    masked: Counter[str] = field(default_factory=Counter)
    damage: str | None = None


def read_parts(connection: Connection, choice: Choice, asked: Iterable[Asked]) -> Iterator[Part]:
    """The part of each rollout in turn; of one that is retired meanwhile it is empty."""
    for rollout_id, scored in asked:
        part = Part(rollout_id)
        try:
            evidence = read_evidence(connection, rollout_id, everything=False)
            if evidence.state in choice.states:
                part.rows.extend(_rows(evidence, choice, scored, part.masked))
        except UnknownRolloutError:
            pass
        except TokenCaptureError as error:
            part.damage = str(error)
        yield part


def _rows(evidence: Evidence, choice: Choice, scored: ScoredAnswer | None, masked: Counter[str]) -> Iterable[Row]:
    if choice.per_request:
        return call_rows(evidence)
    build = build_snapshot(evidence.snapshot, sequences=choice.sequences, models=choice.models, scored=scored)
    reason = why_masked(evidence, build)
    if reason is not None:
        masked[reason] += 1
        return []
    masked.update(row.reason for row in build.rows if row.reasons)
    return trajectory_rows(evidence, build)


def read_parts_together(database: Location, choice: Choice, asked: Iterable[Asked], processes: int) -> Iterator[Part]:
    """The same as ``read_parts``, in the same order, read by so many processes with connections of their own.

    Raises:
        StoreError: one of them was killed.
    """
    batches = iter(asked)
    waiting: deque[Future[list[Part]]] = deque()
    # Not forked: a child must not inherit a connection of SQLite.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=_open, initargs=(database, choice))
    try:
        while batch := list(islice(batches, _ROLLOUTS_AT_ONCE)):
            waiting.append(pool.submit(_read, batch))
            if len(waiting) > processes * _BATCHES_AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise StoreError(
            "a process that read rollouts was killed, perhaps for lack of memory: try again with --jobs 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_held = ExitStack()
_source: list[tuple[Connection, Choice]] = []


def _open(database: Location, choice: Choice) -> None:
    """Prepare a process that reads. The command itself answers an interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collect_rarely()
    _source.append((_held.enter_context(reading(database)), choice))


def _read(batch: list[Asked]) -> list[Part]:
    ((connection, choice),) = _source
    return list(read_parts(connection, choice, batch))
