"""What a writer process does until it is killed: hundreds of coroutines on rollouts that all share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from mmap import mmap
from typing import Any

from token_id_capture import reasons
from token_id_capture.errors import ConflictingEntryError, RolloutFrozenError, RolloutRetiredError, StoreError
from token_id_capture.store import TokenCaptureStore
from torturing.ledger import Ledger
from torturing.plan import Round
from torturing.records import STREAM_TOKENS, call_id, digest_of, entry_of

# Of the time of a rollout: when calls give way to freezing, and freezing to dropping.
OLD = 0.75
YOUNG_SHARE = 0.9
REFUSED_SALT = "x"

Step = Callable[[str], Awaitable[None]]


class Work:
    """The coroutines of one process share a store, a ledger and what they remember."""

    def __init__(self, part: Round, name: str, store: TokenCaptureStore, heartbeat: Callable[[], None]) -> None:
        self._part = part
        self._store = store
        self._dice = random.Random(f"{part.plan.seed}/{part.number}/{name}")
        self._name = name
        self._salts = 0
        self._answered = False
        self._ledger = Ledger(part.plan.ledgers / f"{name}.ledger")
        self._heartbeat = heartbeat
        # Ends of stored sequences, so that prompts continue where earlier calls ended.
        self._ends: dict[str, list[int]] = {}
        self._stored: deque[tuple[str, str]] = deque(maxlen=200)
        self._snapshots: deque[tuple[str, str, int]] = deque(maxlen=50)
        self._while_young: dict[Step, float] = {
            self._call: 60,
            self._put: 25,
            self._again: 6,
            self._lost: 2,
            self._refused: 2,
            self._mark: 1.5,
            self._conflict: 1,
            self._freeze: 0.2,
        }
        self._when_old: dict[Step, float] = {
            self._freeze: 40,
            self._retire: 25,
            self._drop: 20,
            self._mark: 5,
            self._put: 10,
        }

    async def forever(self) -> None:
        """Do one thing after the other. Only a kill ends it, or the death of the parent."""
        parent = os.getppid()
        while os.getppid() == parent:
            try:
                await self._step()
            except StoreError as error:
                # A server may be down when a process starts; one that has answered is waited for.
                late = self._part.plan.url and not self._answered
                self._ledger.write("unopened" if late else "error", time.monotonic_ns(), detail=str(error))
                await asyncio.sleep(0.1)
            except Exception as error:
                self._ledger.write("error", time.monotonic_ns(), detail=f"{type(error).__name__}: {error}")

    async def once(self) -> None:
        """A little of everything, in order, so that the database holds all that can be damaged."""
        kept, frozen, retired = (self._part.rollout_id(index) for index in range(3))
        for rollout_id in (kept, frozen, retired):
            for _ in range(20):
                await self._call(rollout_id)
            for step in (self._lost, self._refused, self._mark, self._conflict):
                await step(rollout_id)
        await self._freeze(frozen)
        await self._retire(retired)

    async def _step(self) -> None:
        young = self._dice.random() < YOUNG_SHARE
        steps = self._while_young if young else self._when_old
        step = self._dice.choices(list(steps), list(steps.values()))[0]
        rollout_id = self._rollout(0.0, OLD) if young else self._rollout(OLD, 1.0)
        await step(rollout_id)
        if self._answered:
            self._heartbeat()

    def _rollout(self, youngest: float, oldest: float) -> str:
        age = self._dice.uniform(youngest, oldest) * self._part.window
        return self._part.rollout_id(max(0, self._part.newest(time.monotonic()) - int(age)))

    def _new_call(self, rollout_id: str, mark: str = "") -> str:
        ends = self._ends.get(rollout_id, [0])
        start = self._dice.choice(ends[-4:]) if self._dice.random() < 0.9 else 0
        prompt = min(start + self._dice.randrange(1, 60), STREAM_TOKENS - 100)
        generation = self._dice.choice((0, 1, 8, 30, 100))
        self._salts += 1
        return call_id(prompt, generation, f"{mark}{self._name}.{self._salts}")

    @asynccontextmanager
    async def _noting(self, kind: str, rollout_id: str, details: dict[str, Any]) -> AsyncIterator[None]:
        """Note the acknowledgement of what happens inside, or the refusal that this rollout may give."""
        started = time.monotonic_ns()
        try:
            yield
        except (RolloutFrozenError, RolloutRetiredError) as refusal:
            refused = "frozen" if isinstance(refusal, RolloutFrozenError) else "retired"
            self._ledger.write(refused, started, rollout_id, detail=kind)
            raise _RefusedError from None
        self._answered = True
        self._ledger.write(kind, started, rollout_id, **details)

    async def _store_call(self, rollout_id: str, call: str) -> None:
        entry = entry_of(rollout_id, call)
        async with self._noting("put", rollout_id, {"call_id": call, "detail": digest_of(entry)}):
            await self._store.put(entry)
        self._stored.append((rollout_id, call))
        ends = self._ends.setdefault(rollout_id, [0])
        ends.append(len(entry.prompt_token_ids) + len(entry.generation_token_ids))
        if len(self._ends) > 2 * self._part.window:
            del self._ends[next(iter(self._ends))]

    async def _begin(self, rollout_id: str, call: str) -> None:
        async with self._noting("begin", rollout_id, {"call_id": call}):
            await self._store.begin_call(rollout_id, call)

    async def _put(self, rollout_id: str) -> None:
        with contextlib.suppress(_RefusedError):
            await self._store_call(rollout_id, self._new_call(rollout_id))

    async def _call(self, rollout_id: str) -> None:
        with contextlib.suppress(_RefusedError):
            call = self._new_call(rollout_id)
            await self._begin(rollout_id, call)
            await asyncio.sleep(self._dice.expovariate(100))
            await self._store_call(rollout_id, call)

    async def _lost(self, rollout_id: str) -> None:
        """A call that begins and never ends."""
        with contextlib.suppress(_RefusedError):
            await self._begin(rollout_id, self._new_call(rollout_id))

    async def _refused(self, rollout_id: str) -> None:
        with contextlib.suppress(_RefusedError):
            call = self._new_call(rollout_id, REFUSED_SALT)
            await self._begin(rollout_id, call)
            async with self._noting("refuse", rollout_id, {"call_id": call}):
                await self._store.refuse_call(rollout_id, call, "too long")

    async def _mark(self, rollout_id: str) -> None:
        detail = f"{self._name}.{self._salts}"
        self._salts += 1
        with contextlib.suppress(_RefusedError):
            async with self._noting("mark", rollout_id, {"detail": detail}):
                await self._store.mark_incomplete(rollout_id, reason=f"{reasons.LOST_STREAM}: {detail}")

    async def _again(self, rollout_id: str) -> None:
        """The same call once more, as a client that retries would send it."""
        if self._stored:
            with contextlib.suppress(_RefusedError):
                await self._store_call(*self._dice.choice(self._stored))

    async def _conflict(self, rollout_id: str) -> None:
        """Another payload under the id of a stored call."""
        if not self._stored:
            return
        stored_rollout, call = self._dice.choice(self._stored)
        entry = entry_of(stored_rollout, call, "another")
        if len(entry.generation_log_probs) == 0:
            return
        with contextlib.suppress(_RefusedError):
            async with self._noting("conflict", stored_rollout, {"call_id": call}):
                try:
                    await self._store.put(entry)
                except ConflictingEntryError:
                    return
                raise AssertionError(f"call {call!r} of rollout {stored_rollout!r} took a second payload")

    async def _freeze(self, rollout_id: str) -> None:
        await self._snapshot(rollout_id)

    async def _snapshot(self, rollout_id: str) -> tuple[str, str, int] | None:
        started = time.monotonic_ns()
        try:
            snapshot = await self._store.freeze(rollout_id)
        except RolloutRetiredError:
            return None
        if not snapshot.snapshot_id:
            return None
        self._ledger.write(
            "freeze",
            started,
            rollout_id,
            snapshot_id=snapshot.snapshot_id,
            version=snapshot.version,
            incomplete=snapshot.incomplete,
            calls=[entry.model_call_id for entry in snapshot.entries],
        )
        known = rollout_id, snapshot.snapshot_id, snapshot.version
        self._snapshots.append(known)
        return known

    async def _retire(self, rollout_id: str) -> None:
        """Hand on and drop, as a consumer does."""
        if known := await self._snapshot(rollout_id):
            await self._drop_as(*known)

    async def _drop(self, rollout_id: str) -> None:
        """Drop some rollout by what this process knew of it, which may be out of date, or never true."""
        if self._snapshots:
            rollout_id, snapshot_id, version = self._dice.choice(self._snapshots)
            await self._drop_as(rollout_id, snapshot_id, version + self._dice.choice((0, 0, 0, 1, -1)))

    async def _drop_as(self, rollout_id: str, snapshot_id: str, version: int) -> None:
        proof = {"snapshot_id": snapshot_id, "version": version}
        self._ledger.write("dropping", time.monotonic_ns(), rollout_id, **proof)
        started = time.monotonic_ns()
        done = await self._store.drop(rollout_id, snapshot_id=snapshot_id, version=version)
        self._ledger.write("drop", started, rollout_id, done=done, **proof)


class _RefusedError(Exception):
    """The rollout is frozen or retired, which is an answer like another."""


def run_writer(part: Round, name: str, counters: mmap, slot: int) -> None:
    """The body of a writer process."""
    view = memoryview(counters).cast("q")

    def heartbeat() -> None:
        view[slot] += 1

    async def main() -> None:
        work = Work(part, name, TokenCaptureStore(part.plan.target), heartbeat)
        await asyncio.gather(*(work.forever() for _ in range(part.plan.coroutines)))

    asyncio.run(main())


def run_once(part: Round) -> None:
    """The body of a process that does a little of everything and ends."""

    async def main() -> None:
        async with TokenCaptureStore(part.plan.target) as store:
            await Work(part, "once", store, lambda: None).once()

    asyncio.run(main())
