"""NeMo Gym's forms: a build as its dict, and what a finished record says of its capture.

Its users know the keys, so this is the one place that writes and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from token_id_capture import reasons
from token_id_capture.builder.attribution import ScoredAnswer
from token_id_capture.builder.rows import lineage
from token_id_capture.errors import ConfigurationError
from token_id_capture.lifecycle import Outcome
from token_id_capture.rebuild import Build, SnapshotRef
from token_id_capture.records import strip_token_fields

BuildDict = dict[str, Any]
Projection = Literal["response", "trajectory", "both"]

MASK_SAMPLE_KEY: Final = "mask_sample"
SNAPSHOT_KEY: Final = "_capture_snapshot"
TOKEN_CAPTURE_KEY: Final = "_ng_token_capture"
"""What became of the capture: metrics, ``error``, ``reason``, ``reasons``, ``divergences``, and the
``rollout_id``, ``snapshot_id`` and ``version`` that the record was built from."""

_PROJECTIONS: Final = ("response", "trajectory", "both")


def scored_answer(record: Mapping[str, Any]) -> ScoredAnswer:
    """What a finished record says of the answer that its reward belongs to."""
    response = record.get("response")
    response = response if isinstance(response, Mapping) else {}
    output = response.get("output")
    return ScoredAnswer(
        model_call_id=_text(record.get("_ng_terminal_model_call_id")),
        declared_response_id=_text(record.get("terminal_response_id")) or _text(response.get("terminal_response_id")),
        response_id=_text(response.get("id")),
        transcript=tuple(map(_content, output)) if isinstance(output, list | tuple) else (),
    )


def _content(item: Any) -> Any:
    return strip_token_fields(item) if isinstance(item, Mapping) else item


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def sequence_dict(build: Build, index: int, model: str = "") -> BuildDict:
    """``build_dict`` of one of the build's rows, and how that row hangs together with the others."""
    row = build.rows[index]
    alone = replace(
        build, rows=(row,), reasons=row.reasons, outcome=Outcome.MASKED if row.reasons else Outcome.DELIVERABLE
    )
    built = build_dict(alone, "response", model)
    told = {"error": alone.explanation} if row.reasons else {}
    built["metrics"] = {**{name: value for name, value in build.metrics.items() if name != "error"}, **told}
    built["lineage"] = lineage(row, index, len(build.rows))
    return built


def build_dict(build: Build, projection: Projection | None = "response", model: str = "") -> BuildDict:
    """The build as NeMo Gym's consumers know it; ``trajectories_from_source`` describes the keys.

    An unknown projection makes it a failed one; None projects nothing.
    """
    if projection is not None and projection not in _PROJECTIONS:
        error = ConfigurationError(f"unknown projection {projection!r}: use one of {', '.join(_PROJECTIONS)}")
        build = build.failing(f"{reasons.BUILD_FAILED}: {error}", error)
    # Without an output the build retires its snapshot although its record needed nothing of it.
    wanted = build.deliverable and build.output is not None
    built: BuildDict = {
        "rollout_id": build.rollout_id,
        "builder": build.builder,
        "rebuilt_response": build.response(model) if wanted and projection in ("response", "both") else None,
        "trajectory": build.trajectory() if wanted and projection in ("trajectory", "both") else None,
        MASK_SAMPLE_KEY: not build.deliverable,
        "outcome": build.outcome.value,
        "reason": build.reason,
        "reasons": list(build.reasons),
        "divergences": build.divergences(),
        "unresolved_retries": list(build.notes.unresolved_retries),
        "metrics": dict(build.metrics),
    }
    if not build.deliverable:
        built["error"] = build.explanation
    if build.snapshot is not None:
        built[SNAPSHOT_KEY] = {"snapshot_id": build.snapshot.snapshot_id, "version": build.snapshot.version}
    return built


def snapshot_of_build(built: Mapping[str, Any], rollout_id: str = "") -> SnapshotRef | None:
    """The snapshot that a build's dict was made from; None if it names none."""
    snapshot = built.get(SNAPSHOT_KEY)
    if not isinstance(snapshot, Mapping) or not snapshot.get("snapshot_id") or "version" not in snapshot:
        return None
    return SnapshotRef(built.get("rollout_id", rollout_id), snapshot["snapshot_id"], snapshot["version"])


def rollout_carries_token_ids(record: Mapping[str, Any]) -> bool:
    """Whether an item of the record's ``response.output`` already has generated token ids."""
    response = record.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list | tuple):
        return False
    return any(isinstance(item, Mapping) and bool(item.get("generation_token_ids")) for item in output)


def model_of(record: Mapping[str, Any]) -> str:
    """The model that the record's response names; empty if it names none."""
    response = record.get("response")
    model = response.get("model") if isinstance(response, Mapping) else None
    return model if isinstance(model, str) else ""


def apply_build(record: dict[str, Any], built: Mapping[str, Any]) -> None:
    """Write a build's dict into its record: the response if it has one, the mask, and ``TOKEN_CAPTURE_KEY``.

    A masked build leaves ``response`` as it is, and a mask that the record brings along stays.
    """
    rebuilt = built["rebuilt_response"]
    if rebuilt is not None:
        if isinstance(record.get("response"), dict):
            record["response"]["output"] = rebuilt["output"]
        else:
            record["response"] = rebuilt
    if built[MASK_SAMPLE_KEY]:
        record[MASK_SAMPLE_KEY] = True
    kept = {key: built[key] for key in ("rollout_id", "builder", "reason", "reasons", "divergences")}
    record[TOKEN_CAPTURE_KEY] = {**built["metrics"], **kept, **built.get("lineage", {}), **built.get(SNAPSHOT_KEY, {})}
