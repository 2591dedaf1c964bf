"""Finished rollouts as lines of JSON: the records that come in and the rows that go out.

A row keeps every field of its record. Numbers that JSON libraries disagree on (integers beyond 64
bits, NaN) and text that is not valid Unicode pass through unharmed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from token_id_capture.finalize.row_format import MaskedRows, RowFormat
from token_id_capture.integrations.nemo_gym import (
    MASK_SAMPLE_KEY,
    TOKEN_CAPTURE_KEY,
    apply_build,
    build_dict,
    model_of,
    rollout_carries_token_ids,
    sequence_dict,
)
from token_id_capture.lifecycle import Sequences
from token_id_capture.rebuild import Build, SnapshotRef
from token_id_capture.records import rollout_id_from_record, validate_rollout_id

_PLACEHOLDER: Final = {"token_ids": [0], "loss_mask": [0], "log_probs": [0.0]}
# NeMo-RL's loader asks for generated data before it looks at mask_sample.
_PLACEHOLDER_ITEM: Final = {
    "type": "message",
    "role": "assistant",
    "content": [],
    "prompt_token_ids": [0],
    "generation_token_ids": [0],
    "generation_log_probs": [0.0],
}
_NUMBERS_AT_ONCE: Final = 8192
_NO_SNAPSHOT: Final = {"snapshot_id": "", "version": 0}


@dataclass(frozen=True)
class RolloutLine:
    """One line of the input that holds a record with a rollout id."""

    number: int
    raw: bytes
    record: dict[str, Any] = field(repr=False)
    rollout_id: str
    exact: bool
    """Whether every number of the record is one that JSON itself knows."""


@dataclass(frozen=True)
class Delivered:
    """What a row of an earlier run says of its rollout. No ``snapshot_id``: it was not built from one.

    ``last``: no row of this rollout follows.
    """

    snapshot_id: str
    version: int
    masked: bool
    last: bool = True


def read_line(number: int, raw: bytes, id_field: str | None) -> RolloutLine:
    """Parse one line of the input.

    Raises:
        ValueError: it is not a JSON object, or carries no rollout id or a malformed one.
    """
    record, exact = parse_record(raw)
    return RolloutLine(number, raw, record, record_rollout_id(record, id_field), exact)


def parse_record(raw: bytes) -> tuple[dict[str, Any], bool]:
    """The record, and whether every number of it is one that JSON itself knows.

    Raises:
        ValueError: it is not a JSON object.
    """
    constants: list[str] = []

    def constant(name: str) -> float:
        constants.append(name)
        return float(name)

    try:
        record = json.loads(raw, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object, but {type(record).__name__}")
    return record, not constants


def record_rollout_id(record: Mapping[str, Any], id_field: str | None) -> str:
    """The rollout id of a record, from ``id_field`` if one is named.

    Raises:
        ValueError: the record carries none, or a malformed one.
    """
    if id_field is not None:
        value = record.get(id_field)
        if value is None:
            raise ValueError(f"no rollout id: the record has no field {id_field!r}")
        return validate_rollout_id(str(value) if type(value) is int else value)
    rollout_id = rollout_id_from_record(record)
    if rollout_id is None:
        raise ValueError(
            "no rollout id: the record has neither _ng_rollout_id nor _ng_task_index and _ng_rollout_index; "
            "name the field that holds it with --id-field"
        )
    return rollout_id


def record_rows(line: RolloutLine, build: Build, masked: MaskedRows = MaskedRows.KEEP) -> bytes:
    """The record with the rebuilt response, or with its mask; with all sequences, one such line for each."""
    if not build.deliverable and masked is MaskedRows.DROP:
        return b""
    if build.wanted is Sequences.MAIN or not build.rows:
        apply_build(line.record, build_dict(build, "response", model_of(line.record)))
        if not build.deliverable and masked is MaskedRows.PLACEHOLDER:
            response = line.record.get("response")
            kept = response if isinstance(response, dict) else {}
            line.record["response"] = {**kept, "output": [_PLACEHOLDER_ITEM]}
        return _dump(line.record, line.exact)
    return b"".join(_sequence_record(line, build, index) for index in range(len(build.rows)))


def _sequence_record(line: RolloutLine, build: Build, index: int) -> bytes:
    record = dict(line.record)
    if isinstance(record.get("response"), dict):
        record["response"] = dict(record["response"])
    apply_build(record, sequence_dict(build, index, model_of(record)))
    return _dump(record, line.exact)


def trajectory_rows(
    line: RolloutLine, build: Build, masked: MaskedRows = MaskedRows.KEEP, snapshot: SnapshotRef | None = None
) -> bytes:
    """The record without its response, and a flat sequence of the build; one such line for each sequence.

    ``snapshot`` is the one to retire, if not that of the build. The three arrays have one length, 0 if
    the sequence is masked, or 1 for a placeholder.
    """
    if not build.deliverable and masked is MaskedRows.DROP:
        return b""
    if not rollout_carries_token_ids(line.record):
        apply_build(line.record, build_dict(build, None))
    # The harness may have masked the record for a reason of its own.
    masked_before = bool(line.record.get(MASK_SAMPLE_KEY))
    kept = {name: value for name, value in line.record.items() if name != "response"}
    ref = snapshot or build.snapshot
    named = {"snapshot_id": ref.snapshot_id if ref else "", "version": ref.version if ref else 0}
    written = []
    for row in build.training_rows():
        told = {MASK_SAMPLE_KEY: masked_before or row.mask_reason is not None, **named}
        filled = _PLACEHOLDER if masked is MaskedRows.PLACEHOLDER and not row.token_ids else {}
        written.append(_dump({**kept, **row.as_dict(), **filled, **told}, line.exact))
    return b"".join(written)


def read_row(raw: bytes, row_format: RowFormat, id_field: str | None) -> tuple[str, Delivered]:
    """What a row of an earlier run says: the rollout id and how it was delivered.

    Raises:
        ValueError: it is not a row of this format.
    """
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError:
        row = json.loads(raw)  # slower, and knows NaN
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    is_trajectory = "token_ids" in row and "loss_mask" in row
    if is_trajectory is not (row_format is RowFormat.TRAJECTORY):
        raise ValueError(f"not a row of --format {row_format}")
    if is_trajectory:
        return validate_rollout_id(row.get("rollout_id", "")), _delivered(row, row.get("mask_reason"))
    capture = row.get(TOKEN_CAPTURE_KEY)
    if not isinstance(capture, dict):
        if not rollout_carries_token_ids(row):
            raise ValueError("a record that was never finalized")
        capture = {}
    return record_rollout_id(row, id_field), _delivered(capture, capture.get("reason"))


def _delivered(told: Mapping[str, Any], reason: object) -> Delivered:
    named = {**_NO_SNAPSHOT, **told}
    index, count = int(told.get("sequence") or 0), int(told.get("sequences") or 1)
    # Without an index, ``sequences`` is a count of the build and not of rows.
    last = "sequence" not in told or index + 1 >= count
    return Delivered(str(named["snapshot_id"]), int(named["version"]), bool(reason), last)


def _dump(row: dict[str, Any], exact: bool) -> bytes:
    if exact:
        try:
            return orjson.dumps(row, default=_written, option=orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:
            pass  # an integer beyond 64 bits, or a lone surrogate: the standard library writes both
    return json.dumps(row, default=_plain, separators=(",", ":")).encode("ascii") + b"\n"


def _written(value: Any) -> Any:
    """Packed sequences as JSON, a part at a time: orjson holds the interpreter's lock for as long as it writes."""
    if len(value) <= _NUMBERS_AT_ONCE:
        return value.tolist()
    starts = range(0, len(value), _NUMBERS_AT_ONCE)
    parts = (orjson.dumps(value[start : start + _NUMBERS_AT_ONCE].tolist())[1:-1] for start in starts)
    return orjson.Fragment(b"[" + b",".join(parts) + b"]")


def _plain(value: Any) -> Any:
    """Packed sequences as lists."""
    return value.tolist()
