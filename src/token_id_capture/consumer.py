"""Turn a finished rollout into a training sequence, or into a reason why there is none.

``build_from_source`` gives a typed ``Build``; ``trajectories_from_source`` gives the dict that NeMo Gym's
users know. Neither raises at its reader. A build is unmasked only if the snapshot is complete and its
calls form one sequence from one root, contiguous, with no doubt about which response was used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from token_id_capture import reasons
from token_id_capture.builder.attribution import ScoredAnswer
from token_id_capture.errors import UnknownRolloutError
from token_id_capture.integrations.nemo_gym import (
    BuildDict,
    Projection,
    build_dict,
    snapshot_of_build,
)
from token_id_capture.lifecycle import Outcome
from token_id_capture.protocols import OutcomeRecorder, TokenCaptureSnapshot, TokenSource, offers
from token_id_capture.rebuild import DEFAULT_BUILDER, Build, SnapshotRef, build_snapshot
from token_id_capture.records import rollout_id_from_record, validate_rollout_id

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


async def build_from_source(
    rollout_id: str,
    source: TokenSource,
    project: Callable[[Build], _Result],
    build_with: Callable[[TokenCaptureSnapshot], Build] = build_snapshot,
) -> tuple[Build, _Result]:
    """Freeze the rollout and build it; returns the build and what ``project`` makes of it. Never raises.

    ``build_with`` is ``build_snapshot`` with other options. Both are computed in a thread, so that the event
    loop stays free. A source that is an ``OutcomeRecorder`` is told masked and failed outcomes at once.
    """
    try:
        validate_rollout_id(rollout_id)
    except ValueError as error:
        build = Build.failed(rollout_id, f"{reasons.INVALID_ROLLOUT_ID}: {error}", error)
        return build, project(build)
    try:
        snapshot = await source.freeze(rollout_id)
    except Exception as error:
        logger.warning("rollout %s could not be frozen: %s", rollout_id, error)
        build = Build.failed(rollout_id, f"{reasons.FREEZE_FAILED}: {error or type(error).__name__}", error)
        return build, project(build)

    def compute() -> tuple[Build, _Result]:
        build = build_with(snapshot)
        return build, project(build)

    build, projected = await asyncio.to_thread(compute)
    if build.error is not None:
        logger.warning("rollout %s could not be built from %d calls: %s", rollout_id, build.calls, build.error)
    if not build.deliverable:
        await record_build(source, build, build.outcome)
    return build, projected


async def trajectories_from_source(
    rollout_id: str,
    source: TokenSource,
    *,
    builder: str = DEFAULT_BUILDER,
    model: str = "",
    projection: Projection = "response",
    scored: ScoredAnswer | None = None,
) -> BuildDict:
    """Freeze the rollout, build and project it. Never raises; the event loop stays free meanwhile.

    ``projection`` chooses what an unmasked build carries: ``rebuilt_response``, a Responses-shaped
    dict whose size grows with the square of the turns, ``trajectory``, a flat ``Trajectory``, or
    both. ``model`` names the response's model; without it the recorded name stands.
    ``scored`` is what the finished record says of the answer that was scored: it ends the sequence.

    Returns a dict with

    - ``rollout_id``, ``builder``, ``mask_sample``, ``rebuilt_response``, ``trajectory``;
    - ``outcome``: ``deliverable``, ``masked`` (a rule forbids it) or ``failed`` (it could not be
      frozen or built);
    - ``reason``: a code, empty if unmasked; ``reasons``: all that apply, each ``"code: particulars"``;
      ``error``: the reason in words, only if masked;
    - ``divergences``: where prompts diverge from earlier calls, at most 16, as plain dicts;
    - ``unresolved_retries``: ids of calls that answer one prompt, none of them continued;
    - ``metrics``: counts, all JSON;
    - ``_capture_snapshot``: ``{"snapshot_id", "version"}`` of the snapshot, unless the freeze failed.

    A source that is an ``OutcomeRecorder`` is told masked and failed outcomes at once.
    """
    _, built = await build_from_source(
        rollout_id,
        source,
        lambda build: build_dict(build, projection, model),
        partial(build_snapshot, builder=builder, scored=scored),
    )
    return built


async def record_build(source: TokenSource, build: Build, outcome: Outcome) -> bool:
    """Tell a source that is an ``OutcomeRecorder`` what became of the build's snapshot.

    Never raises: an outcome that cannot be recorded is logged. Returns whether it was recorded.
    """
    if build.snapshot is None:
        return False
    return await _record(source, build.snapshot, outcome, build.reason, build.details())


async def record_outcome(source: TokenSource, built: Mapping[str, Any], outcome: str) -> bool:
    """``record_build`` for the dict of a build."""
    snapshot = snapshot_of_build(built)
    if snapshot is None:
        return False
    details = {**built.get("metrics", {}), "reasons": built.get("reasons", [])}
    details["divergences"] = built.get("divergences", [])
    return await _record(source, snapshot, outcome, built.get("reason", ""), details)


async def retire_snapshot(source: TokenSource, snapshot: SnapshotRef) -> bool:
    """Delete the capture if exactly this snapshot and version is still the rollout's latest state.

    Call it only once what was built of it is durable elsewhere. Never raises; returns whether the capture is gone.
    """
    try:
        dropped = await source.drop(snapshot.rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    except Exception as error:
        logger.warning("rollout %s was not retired: %s", snapshot.rollout_id, error)
        return False
    if not dropped:
        logger.warning("rollout %s was not retired: its state changed after it was built", snapshot.rollout_id)
    return dropped


async def _record(
    source: TokenSource, snapshot: SnapshotRef, outcome: str, reason: str, details: Mapping[str, Any]
) -> bool:
    if not offers(source, OutcomeRecorder) or not snapshot.snapshot_id:
        return False
    try:
        await source.record_outcome(snapshot.snapshot_id, snapshot.version, outcome, reason, details)
    except Exception as error:
        # Repeating a retirement that succeeded is fine; its snapshot is already gone.
        level = logging.INFO if isinstance(error, UnknownRolloutError) else logging.WARNING
        logger.log(level, "outcome %r of snapshot %s was not recorded: %s", str(outcome), snapshot.snapshot_id, error)
        return False
    return True


def trajectories_for_rollout(
    rollout_id: str,
    token_capture_dirs: Iterable[str | Path],
    *,
    builder: str = DEFAULT_BUILDER,
    model: str = "",
    projection: Projection = "response",
) -> BuildDict | None:
    """Build a rollout from the first of these directories that knows it; None if there is none.

    Blocks until it is done; the store works in a thread of its own, so a running event loop is no
    obstacle. The dict is that of ``trajectories_from_source``.
    """
    from token_id_capture.store import TokenCaptureStore
    from token_id_capture.store.file.location import DATABASE_NAME

    async def build() -> BuildDict | None:
        unknown: BuildDict | None = None
        for directory in token_capture_dirs:
            store = TokenCaptureStore(Path(directory) / DATABASE_NAME, create=False)
            try:
                built = await trajectories_from_source(
                    rollout_id, store, builder=builder, model=model, projection=projection
                )
            finally:
                await store.close()
            if built["reason"] not in (reasons.NOTHING_RECORDED, reasons.FREEZE_FAILED):
                return built
            unknown = unknown or built
        return unknown

    return _in_a_thread(build)


def clear_token_captures_for_rollouts(
    records: Iterable[Mapping[str, Any]], token_capture_dirs: Iterable[str | Path]
) -> None:
    """Delete stale captures, tombstones included, of exactly the rollouts that are about to be dispatched.

    Ids repeat between runs, and a second attempt must never hold a call of the first. Records
    without an id are passed over, and so is a directory without a database.

    Raises:
        ValueError: a record has a malformed id; nothing was deleted.
        StoreError: a database cannot be opened or written.
    """
    from token_id_capture.store import TokenCaptureStore
    from token_id_capture.store.file.location import DATABASE_NAME

    databases = [Path(directory) / DATABASE_NAME for directory in token_capture_dirs]
    if not databases:
        return
    found = (rollout_id_from_record(record) for record in records)
    rollout_ids = list(dict.fromkeys(rollout_id for rollout_id in found if rollout_id is not None))

    async def clear() -> None:
        for database in databases:
            if not database.exists():
                continue
            store = TokenCaptureStore(database, create=False)
            try:
                await store.delete(rollout_ids)
            finally:
                await store.close()

    if rollout_ids:
        _in_a_thread(clear)


def token_id_capture_dirs_from_config(config: Mapping[str, Any]) -> list[Path]:
    """The directory that this configuration captures to and that can be read back, or an empty list.

    Raises:
        ValueError: the block ``token_id_capture`` is malformed.
    """
    from token_id_capture.config import TokenIdCaptureConfig

    settings = TokenIdCaptureConfig.model_validate(config)
    directory = settings.resolved_dir()
    if not settings.enabled or settings.token_id_capture.sink is not None or directory is None:
        return []
    return [directory]


def _in_a_thread(work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="token-id-capture") as thread:
        return thread.submit(lambda: asyncio.run(work())).result()
