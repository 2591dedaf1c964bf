"""Turn a finished rollout into a training sequence, or into a reason why there is none.

A build is a plain dict that never raises at its reader. It is unmasked only if the snapshot is
complete and its calls form one sequence from one root, contiguous, with no doubt about which answer
was used. Everything else has ``mask_sample`` true, a ``reason`` of ``token_id_capture.reasons``, an
``error`` in words, and nothing to train on: ``rebuilt_response`` and ``trajectory`` are None.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from token_id_capture import reasons
from token_id_capture.builder import (
    BuildOutput,
    project_main_chain_response,
    project_main_chain_trajectory,
    run_builder,
)
from token_id_capture.errors import ConfigurationError, InvalidEntryError, UnknownRolloutError
from token_id_capture.protocols import OutcomeRecorder, TokenCaptureSnapshot, TokenSource
from token_id_capture.records import rollout_id_from_record, validate_rollout_id

logger = logging.getLogger(__name__)

Build = dict[str, Any]
Projection = Literal["response", "trajectory", "both"]

MASK_SAMPLE_KEY: Final = "mask_sample"
SNAPSHOT_KEY: Final = "_capture_snapshot"

_PROJECTIONS: Final = ("response", "trajectory", "both")
_LISTED_DIVERGENCES: Final = 16
_NAMED_CALLS: Final = 8

_Result = TypeVar("_Result")


async def trajectories_from_source(
    rollout_id: str,
    source: TokenSource,
    *,
    builder: str = "prefix_merging",
    model: str = "",
    projection: Projection = "response",
) -> Build:
    """Freeze the rollout, build and project it. Never raises; the event loop stays free meanwhile.

    ``projection`` chooses what an unmasked build carries: ``rebuilt_response``, a Responses-shaped
    dict whose size grows with the square of the turns, ``trajectory``, a flat ``Trajectory``, or
    both. ``model`` names the response's model; without it the recorded name stands.

    Returns a dict with

    - ``rollout_id``, ``builder``, ``mask_sample``, ``rebuilt_response``, ``trajectory``;
    - ``outcome``: ``deliverable``, ``masked`` (a rule forbids it) or ``failed`` (it could not be
      frozen or built);
    - ``reason``: a code, empty if unmasked; ``reasons``: all that apply, each ``"code: particulars"``;
      ``error``: the reason in words, only if masked;
    - ``divergences``: where prompts depart from earlier calls, at most 16, as plain dicts;
    - ``unresolved_retries``: ids of calls that answer one prompt and of which none was continued;
    - ``metrics``: counts, all JSON;
    - ``_capture_snapshot``: ``{"snapshot_id", "version"}`` of the snapshot, unless the freeze failed.

    A source that is an ``OutcomeRecorder`` is told masked and failed outcomes at once.
    """
    built = blank_build(rollout_id, builder)
    try:
        validate_rollout_id(rollout_id)
    except ValueError as error:
        return _mask(built, "failed", [f"{reasons.INVALID_ROLLOUT_ID}: {error}"])
    try:
        snapshot = await source.freeze(rollout_id)
        built[SNAPSHOT_KEY] = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
    except Exception as error:
        logger.warning("rollout %s could not be frozen: %s", rollout_id, error)
        return _mask(built, "failed", [f"{reasons.FREEZE_FAILED}: {error or type(error).__name__}"])
    try:
        await asyncio.to_thread(_build, built, snapshot, model, projection)
    except Exception as error:
        logger.warning("rollout %s could not be built from %d calls: %s", rollout_id, len(snapshot.entries), error)
        incomplete = [reasons.CAPTURE_INCOMPLETE] if snapshot.incomplete else []
        _mask(built, "failed", [f"{reasons.BUILD_FAILED}: {error or type(error).__name__}", *incomplete])
    if built[MASK_SAMPLE_KEY]:
        await record_outcome(source, built, built["outcome"])
    return built


def blank_build(rollout_id: str, builder: str = "prefix_merging") -> Build:
    """A build of nothing yet: masked, without a reason, all counts zero."""
    return {
        "rollout_id": rollout_id,
        "builder": builder,
        "rebuilt_response": None,
        "trajectory": None,
        MASK_SAMPLE_KEY: True,
        "outcome": "failed",
        "reason": "",
        "reasons": [],
        "divergences": [],
        "unresolved_retries": [],
        "metrics": _metrics(None, None),
    }


def unusable_build(rollout_id: str, reason: str) -> Build:
    """The failed build of a rollout that cannot even be looked up; ``reason`` as in ``reasons``."""
    return _mask(blank_build(rollout_id), "failed", [reason])


def _mask(built: Build, outcome: str, found: list[str]) -> Build:
    code, detail = reasons.split_reason(found[0])
    built.update(rebuilt_response=None, trajectory=None, outcome=outcome, reason=code, reasons=found)
    built[MASK_SAMPLE_KEY] = True
    built["error"] = f"{code}: {reasons.BUILD_REASONS[code]}" + (f" ({detail})" if detail else "")
    built["metrics"]["error"] = built["error"]
    return built


def _build(built: Build, snapshot: TokenCaptureSnapshot, model: str, projection: str) -> None:
    """The part that computes; runs in a thread. Changes ``built``."""
    built["metrics"] = _metrics(snapshot, None)
    if projection not in _PROJECTIONS:
        raise ConfigurationError(f"unknown projection {projection!r}: use one of {', '.join(_PROJECTIONS)}")
    foreign = {entry.rollout_id for entry in snapshot.entries} - {snapshot.rollout_id}
    if foreign:
        raise InvalidEntryError(f"the snapshot holds calls of other rollouts: {_named(sorted(foreign))}")
    output = run_builder(snapshot.entries, built["builder"])
    notes = output.notes
    built["metrics"] = _metrics(snapshot, output)
    built["divergences"] = [asdict(divergence) for divergence in notes.divergences[:_LISTED_DIVERGENCES]]
    built["unresolved_retries"] = list(notes.unresolved_retries)
    if output.chains:
        output.main_chain()  # a builder that makes none is not for delivery, and says so
    found = _reasons_to_mask(snapshot, output)
    if found:
        _mask(built, "masked", found)
        return
    # Both projections prove again that the chain is contiguous and has all its log probabilities.
    response, trajectory = None, None
    if projection != "trajectory":
        response = project_main_chain_response(snapshot.rollout_id, output, model=model)
    if projection != "response":
        trajectory = project_main_chain_trajectory(output)
    built.update(rebuilt_response=response, trajectory=trajectory, outcome="deliverable")
    built[MASK_SAMPLE_KEY] = False


def _reasons_to_mask(snapshot: TokenCaptureSnapshot, output: BuildOutput) -> list[str]:
    """Why this must not be trained on, the cause before its consequences; empty: nothing forbids it."""
    notes = output.notes
    found: list[str] = []
    if snapshot.incomplete:
        found.append(reasons.CAPTURE_INCOMPLETE)
    if not snapshot.entries:
        found.append(reasons.NOTHING_RECORDED)
    elif not output.chains:
        found.append(f"{reasons.EMPTY_GENERATIONS}: {_named(notes.empty_generation_calls)}")
    if notes.unresolved_retries:
        found.append(f"{reasons.UNRESOLVED_RETRY}: {_named(notes.unresolved_retries)}")
    if notes.roots > 1:
        first = next((one for one in notes.divergences if one.parent_call_id is None), None)
        found.append(f"{reasons.MULTIPLE_ROOTS}: {notes.roots} roots" + (f"; {first}" if first else ""))
    if notes.chains > max(notes.roots, 1):
        first = next((one for one in notes.divergences if one.parent_call_id is not None), None)
        found.append(f"{reasons.MULTIPLE_CHAINS}: {notes.chains} sequences" + (f"; {first}" if first else ""))
    if notes.aborted_calls:
        found.append(f"{reasons.ABORTED_CALL}: {_named(notes.aborted_calls)}")
    return found


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_CALLS
    return ", ".join(names[:_NAMED_CALLS]) + (f" and {rest} more" if rest > 0 else "")


def _metrics(snapshot: TokenCaptureSnapshot | None, output: BuildOutput | None) -> dict[str, Any]:
    calls = len(snapshot.entries) if snapshot is not None else 0
    built = output if output is not None else BuildOutput([])
    notes = built.notes
    return {
        "n_calls": calls,
        "chains": notes.chains,
        "roots": notes.roots,
        "quarantined_calls": len(built.quarantined),
        "quarantined_fraction": round(len(built.quarantined) / calls, 4) if calls else 0.0,
        "copied_calls": len(notes.copied_calls),
        "empty_generation_calls": len(notes.empty_generation_calls),
        "divergent_prompts": len(notes.divergences),
        "delivered_fraction": notes.delivered_fraction,
        "generated_tokens_captured": notes.generated_tokens_captured,
        "generated_tokens_delivered": notes.generated_tokens_delivered,
        "capture_incomplete": snapshot.incomplete if snapshot is not None else False,
    }


async def record_outcome(source: TokenSource, built: Mapping[str, Any], outcome: str) -> bool:
    """Tell a source that is an ``OutcomeRecorder`` what became of the build's snapshot.

    Never raises: a outcome that cannot be recorded is logged. Returns whether it was recorded.
    """
    snapshot = built.get(SNAPSHOT_KEY)
    if not isinstance(source, OutcomeRecorder) or not snapshot or not snapshot["snapshot_id"]:
        return False
    details = {**built.get("metrics", {}), "reasons": built.get("reasons", [])}
    details["divergences"] = built.get("divergences", [])
    snapshot_id, version = snapshot["snapshot_id"], snapshot["version"]
    try:
        await source.record_outcome(snapshot_id, version, outcome, built.get("reason", ""), details)
    except Exception as error:
        # Repeating a retirement that succeeded is fine, and then there is no snapshot any more.
        level = logging.INFO if isinstance(error, UnknownRolloutError) else logging.WARNING
        logger.log(level, "outcome %r of snapshot %s was not recorded: %s", outcome, snapshot_id, error)
        return False
    return True


def trajectories_for_rollout(
    rollout_id: str,
    token_capture_dirs: Iterable[str | Path],
    *,
    builder: str = "prefix_merging",
    model: str = "",
    projection: Projection = "response",
) -> Build | None:
    """Build a rollout from the first of these directories that knows it; None if there is none.

    Blocks until it is done; the store works in a thread of its own, so a running event loop is no
    obstacle. The dict is that of ``trajectories_from_source``.
    """
    from token_id_capture.store import TokenCaptureStore
    from token_id_capture.store.file.location import DATABASE_NAME

    async def build() -> Build | None:
        unknown: Build | None = None
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
