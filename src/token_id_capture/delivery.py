"""Put a build into a rollout record, and delete the capture once the record is safe.

::

    built = await finalize_rollout_token_capture(record, source)
    ...                                    # write the record, fsync it, or hand it to the trainer
    await retire_rollout_token_capture(rollout_id, source, built)

A masked record keeps its own ``response.output`` exactly as the harness left it: a sequence that must
not be trained on is not written into it. It gets ``mask_sample`` and the reasons, and its capture
stays in the store as evidence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from token_id_capture import reasons
from token_id_capture.consumer import record_outcome, retire_snapshot, trajectories_from_source
from token_id_capture.integrations.nemo_gym import (
    MASK_SAMPLE_KEY,
    TOKEN_CAPTURE_KEY,
    BuildDict,
    Projection,
    apply_build,
    build_dict,
    model_of,
    rollout_carries_token_ids,
    scored_answer,
    snapshot_of_build,
)
from token_id_capture.lifecycle import Outcome
from token_id_capture.protocols import TokenSource
from token_id_capture.rebuild import Build, SnapshotRef, unneeded_build
from token_id_capture.records import rollout_id_from_record, validate_rollout_id

__all__ = [
    "MASK_SAMPLE_KEY",
    "TOKEN_CAPTURE_KEY",
    "build_of_record",
    "capture_build_can_retire",
    "finalize_rollout_token_capture",
    "record_delivery",
    "retire_rollout_token_capture",
    "rollout_carries_token_ids",
]

logger = logging.getLogger(__name__)

_REDUNDANT_CAPTURE_KEY: Final = "_redundant_capture"
_DELIVERED_KEY: Final = "_delivered_record"


async def finalize_rollout_token_capture(
    result: dict[str, Any],
    source: TokenSource | None,
    *,
    rollout_id: str | None = None,
    projection: Projection = "response",
) -> BuildDict | None:
    """Rebuild one finished record from its capture. Changes ``result``, never raises, deletes nothing.

    Unmasked: ``response.output`` is replaced (the whole response, if the record has none), unless
    ``projection`` is ``"trajectory"``; the flat sequence is only in the build that is returned.
    Masked: ``mask_sample`` is set to true. Either way ``TOKEN_CAPTURE_KEY`` is set. A ``mask_sample``
    that the record brings along is never cleared.

    A record that already carries token ids is left as it is, byte for byte: they are what the policy
    sampled. Its redundant capture is frozen, and may be retired with the build that is returned.

    Args:
        result: the record; its id is ``rollout_id``, else what ``rollout_id_from_record`` finds.
        source: None if this caller does not rebuild; then nothing happens.

    Returns:
        The build as ``trajectories_from_source`` describes it; None without a source, or if a record
        with token ids has no capture that could be retired.
    """
    if source is None:
        return None
    carries = rollout_carries_token_ids(result)
    try:
        found = validate_rollout_id(rollout_id) if rollout_id is not None else rollout_id_from_record(result)
    except ValueError as error:
        return (
            None if carries else _apply(result, build_dict(Build.failed("", f"{reasons.INVALID_ROLLOUT_ID}: {error}")))
        )
    if found is None:
        return None if carries else _apply(result, build_dict(Build.failed("", reasons.NO_CAPTURE_KEY)))
    if carries:
        return await _redundant(found, source)
    built = await trajectories_from_source(
        found, source, model=model_of(result), projection=projection, scored=scored_answer(result)
    )
    return _apply(result, built)


async def retire_rollout_token_capture(
    rollout_id: str, source: TokenSource | None, built: Mapping[str, Any] | None
) -> bool:
    """Delete the capture of a record that was delivered. Call it only once that is durable.

    Deletes only what an unmasked build was made from, and only if exactly that snapshot and version
    is still the rollout's latest state. The delivery is recorded first. Never raises; returns
    whether the capture is gone.
    """
    if source is None or built is None or not capture_build_can_retire(built):
        return False
    if built.get("rollout_id", rollout_id) != rollout_id:
        logger.warning("rollout %s was not retired: the build is of rollout %s", rollout_id, built["rollout_id"])
        return False
    snapshot = snapshot_of_build(built, rollout_id)
    if snapshot is None:
        return False
    await record_delivery(source, built)
    return await retire_snapshot(source, snapshot)


def build_of_record(result: Mapping[str, Any]) -> BuildDict | None:
    """What retirement needs of the build of a finalized record, read back from the record itself.

    So an interrupted batch can still retire exactly what it delivered. None if the record was not
    finalized, or its capture was masked.
    """
    summary = result.get(TOKEN_CAPTURE_KEY)
    if not isinstance(summary, Mapping) or summary.get("reason") or not summary.get("snapshot_id"):
        return None
    snapshot = SnapshotRef(str(summary.get("rollout_id", "")), summary["snapshot_id"], summary["version"])
    build = Build(snapshot.rollout_id, snapshot, Outcome.DELIVERABLE, builder=str(summary.get("builder", "")))
    built = build_dict(build)
    built["metrics"] = {key: summary[key] for key in built["metrics"] if key in summary}
    return {**built, _DELIVERED_KEY: True}


async def record_delivery(source: TokenSource, built: Mapping[str, Any]) -> bool:
    """Record that an unmasked build was delivered, without deleting its capture. Never raises.

    Returns whether it was recorded: false for a masked build, for a source that records no outcomes,
    and after an error, which is logged.
    """
    return capture_build_can_retire(built) and await record_outcome(source, built, Outcome.DELIVERED)


def capture_build_can_retire(built: Mapping[str, Any] | None) -> bool:
    """Whether the build is unmasked, had a sequence (or found it unneeded), and names its snapshot."""
    if built is None or built.get(MASK_SAMPLE_KEY, True):
        return False
    if snapshot_of_build(built) is None:
        return False
    sequence = built.get("rebuilt_response") is not None or built.get("trajectory") is not None
    return sequence or any(built.get(key) for key in (_REDUNDANT_CAPTURE_KEY, _DELIVERED_KEY))


def _apply(result: dict[str, Any], built: BuildDict) -> BuildDict:
    apply_build(result, built)
    if built[MASK_SAMPLE_KEY]:
        logger.warning("rollout %s is masked: %s", built["rollout_id"] or "without an id", built["error"])
    return built


async def _redundant(rollout_id: str, source: TokenSource) -> BuildDict | None:
    """Freeze what was captured of a record that needs nothing of it."""
    try:
        snapshot = await source.freeze(rollout_id)
    except Exception as error:
        logger.warning("the redundant capture of rollout %s could not be frozen: %s", rollout_id, error)
        return None
    if not snapshot.snapshot_id:
        return None
    return {**build_dict(unneeded_build(snapshot)), _REDUNDANT_CAPTURE_KEY: True}
