"""Copy rollouts from one database to another, exactly, a transaction for each or for a few small ones.

A rollout is in the target whole or not at all, so a copy that was stopped at any point is completed by the same copy
again. Rows pass through one at a time, so memory stays flat however large a rollout is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from token_id_capture.errors import StoreError
from token_id_capture.lifecycle import State
from token_id_capture.store.codec import UNREADABLE
from token_id_capture.store.copying.parts import PARTS, Head, LeftOutError, Part, Row, Rows, TryAgainError, heads
from token_id_capture.store.copying.sides import Source, Target, WritableRows
from token_id_capture.store.maintain.verification import Damage, Progress, problems_of_call
from token_id_capture.store.sequence_walk import SequenceWalk

_ROLLOUTS_TOGETHER: Final = 64
_CALLS_TOGETHER: Final = 1_000
_ATTEMPTS: Final = 5


@dataclass(slots=True)
class Copied:
    """What a copy did, by rollouts. What is in one of the lists was left out, and nothing of it was changed.

    ``already_there`` counts those that the target held as they are. ``conflicts`` are those that it holds and that
    differ, ``open_rollouts`` those that are not frozen, ``absent`` those that were asked for and are not in the
    source, and ``damaged`` says what in the source is not as it was stored. ``calls`` were stored by the copied
    rollouts; their copies in snapshots are not counted.
    """

    copied: int = 0
    calls: int = 0
    already_there: int = 0
    conflicts: list[str] = field(default_factory=list)
    open_rollouts: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    damaged: list[Damage] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the target now holds all that was asked for."""
        return not (self.conflicts or self.open_rollouts or self.absent or self.damaged)


def copy_rollouts(
    source: Source,
    target: Target,
    rollout_ids: Sequence[str] = (),
    *,
    include_open: bool = False,
    copied: Copied | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Copied:
    """Copy these rollouts, or all: calls, intents, flags, snapshots, outcomes, late writes and tombstones.

    It blocks, and may be stopped at any point; the same call again completes it. A rollout that the target has
    already is compared by its digests and never changed.

    Args:
        include_open: copy rollouts that are open too, as they are. Calls that they get later are missing from the
            copy, and nothing tells that, so no process should write them any more.
        copied: is updated during the copy, so that an interrupted caller can read it.

    Raises:
        StoreError: one of the databases cannot be used any more; what was copied so far is in the target.
    """
    copied = copied or Copied()
    total = len(rollout_ids) or source.count()
    done = 0
    for batch in _batches(source, rollout_ids):
        progress("copy", done, max(total, done))
        _copy_together(source, target, batch, copied, include_open=include_open, asked=bool(rollout_ids))
        done += len(batch)
    progress("copy", done, done)
    return copied


def _batches(source: Source, rollout_ids: Sequence[str]) -> Iterator[list[str]]:
    """Ids of rollouts that are copied in one transaction: a few small ones, or one that is large."""
    batch: list[str] = []
    calls = 0
    for page in _pages(source, rollout_ids):
        for rollout_id, more in page:
            if batch and (len(batch) == _ROLLOUTS_TOGETHER or calls + more > _CALLS_TOGETHER):
                yield batch
                batch, calls = [], 0
            batch.append(rollout_id)
            calls += more
    if batch:
        yield batch


def _pages(source: Source, rollout_ids: Sequence[str]) -> Iterator[list[tuple[str, int]]]:
    wanted = tuple(dict.fromkeys(rollout_ids))
    for start in range(0, len(wanted), _ROLLOUTS_TOGETHER):
        yield source.listed(wanted[start : start + _ROLLOUTS_TOGETHER])
    after = ""
    while not wanted and (page := source.page(after, _ROLLOUTS_TOGETHER)):
        yield page
        after = page[-1][0]


def _copy_together(
    source: Source, target: Target, rollout_ids: list[str], copied: Copied, *, include_open: bool, asked: bool
) -> None:
    try:
        step = _step(source, target, rollout_ids, include_open=include_open)
    except LeftOutError as damaged:
        # All of it was rolled back, and the others are copied without the one that is damaged.
        if len(rollout_ids) == 1:
            copied.damaged.append(damaged.damage)
        for rollout_id in rollout_ids if len(rollout_ids) > 1 else ():
            _copy_together(source, target, [rollout_id], copied, include_open=include_open, asked=asked)
        return
    copied.copied += len(step.wanted)
    copied.calls += sum(head.calls for head in step.wanted.values())
    copied.already_there += step.already_there
    copied.conflicts += step.conflicts
    copied.open_rollouts += step.open_rollouts
    copied.absent += step.absent if asked else ()


@dataclass(slots=True)
class _Step:
    wanted: dict[str, Head] = field(default_factory=dict)
    already_there: int = 0
    conflicts: list[str] = field(default_factory=list)
    open_rollouts: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def _step(source: Source, target: Target, rollout_ids: list[str], *, include_open: bool) -> _Step:
    """One transaction, which is repeated where others were in its way."""
    for _ in range(_ATTEMPTS):
        try:
            # The target first: a wait for its writers must not keep the source's state.
            with target.transaction() as there, source.state() as here:
                step = _compare(
                    heads(here, rollout_ids), heads(there, rollout_ids), rollout_ids, include_open=include_open
                )
                _write(here, there, step.wanted)
            return step
        except TryAgainError as error:
            refused = error
    raise StoreError(
        f"the target refused rollout {rollout_ids[0]!r} and those with it {_ATTEMPTS} times, because of what others "
        f"did meanwhile ({refused.__cause__}): the same copy again copies the rest"
    ) from refused


def _compare(here: dict[str, Head], there: dict[str, Head], rollout_ids: list[str], *, include_open: bool) -> _Step:
    step = _Step()
    for rollout_id in rollout_ids:
        head = here.get(rollout_id)
        if head is None:
            step.absent.append(rollout_id)
        elif head.damage:
            raise LeftOutError(Damage(head.damage, rollout_id))
        elif rollout_id in there and there[rollout_id].digest == head.digest:
            step.already_there += 1
        elif rollout_id in there:
            step.conflicts.append(rollout_id)
        elif head.state is State.OPEN and not include_open:
            step.open_rollouts.append(rollout_id)
        else:
            step.wanted[rollout_id] = head
    return step


def _write(here: Rows, there: WritableRows, wanted: Iterable[str]) -> None:
    rollout_ids = tuple(wanted)
    for part in PARTS if rollout_ids else ():
        rows = here.select(part, part.columns, rollout_ids)
        there.insert(part, _sound(part, rows) if part.holds_calls else rows)


def _sound(part: Part, rows: Iterator[Row]) -> Iterator[Row]:
    """The same rows, each compared with its digests. A call is stored after the one that its prompt continues."""
    walks: dict[tuple[str, str, int | None], SequenceWalk] = defaultdict(SequenceWalk)
    for row in rows:
        call = dict(zip(part.columns, row, strict=True))
        key = call["rollout_id"], call.get("snapshot_id", ""), call.get("version")
        try:
            problems = problems_of_call(call, walks[key])
        except UNREADABLE as error:
            problems = [f"cannot be read ({error})"]
        for problem in problems:
            raise LeftOutError(Damage(problem, key[0], call["model_call_id"], *key[1:]))
        yield row
