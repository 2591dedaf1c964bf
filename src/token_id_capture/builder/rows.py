"""Sequences as rows for trainers: plain fields, one row a sequence. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from token_id_capture.builder.chains import Chain
from token_id_capture.builder.projections import Trajectory
from token_id_capture.builder.sequences import Sequence
from token_id_capture.provenance import Mode
from token_id_capture.records import TokenEntry, media_of
from token_id_capture.tokens import LogProbs, TokenIds

_TRUNCATED: Final = "length"
SAMPLING_NUMBERS: Final = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
SAMPLING_INTEGERS: Final = ("top_k", "seed", "max_tokens")
_NESTED: Final = "sampling_params"
"""Where vLLM's and SGLang's own endpoints have them."""
_LARGEST: Final = 2**63
_NOTHING = Trajectory(TokenIds(), [], LogProbs())


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One sequence of N tokens, for a trainer.

    ``sequence`` is its index among the ``sequences`` rows of its rollout, which share one reward.
    ``parent`` is the index of the row that it departs from and ``parent_token`` the first token, from 0, at
    which both differ; None if it departs from none. ``agent`` is who speaks, ``purpose`` what for, None
    where the harness does not tell. ``segment`` counts how often the agent's conversation was compacted
    before, and ``cause`` says why the sequence starts anew, None for the first. ``multimodal`` says that its tokens
    stand for images, sounds or files too, which a trainer has to get from elsewhere. ``continuity`` is the policy
    of ``--continuity`` by which prompts of the row were made of the tokens of earlier calls; None where the
    chat template made all of them.

    ``finish_reason`` is that of the last answer, and ``truncated`` says that a limit cut it off.
    ``prompt_length`` counts the tokens before the first answer. ``turn_spans`` has an object an answer:
    ``start``, ``end`` (exclusive), ``model_call_id``, ``response_id`` and ``model``. ``weight_versions`` has
    objects of ``start``, ``end`` and ``version``, where the engine tells them. ``sampling`` are the last
    request's parameters, in the fields of ``sampling_fields``, and ``log_probs_mode`` says whether log
    probabilities are those before or after temperature and the like; None if calls differ or nobody told.

    ``token_ids``, ``loss_mask`` (0 or 1) and ``log_probs`` (0.0 where the mask is 0) have N items, none if the
    row is masked; then ``mask_reason`` is a code of ``token_id_capture.reasons``.
    """

    rollout_id: str
    sequence: int
    sequences: int
    parent: int | None
    parent_token: int | None
    agent: str | None
    purpose: str | None
    segment: int
    cause: str | None
    multimodal: bool
    continuity: str | None
    mask_reason: str | None
    finish_reason: str | None
    truncated: bool
    prompt_length: int
    turn_spans: list[dict[str, Any]]
    sampling: dict[str, Any] | None
    log_probs_mode: str | None
    weight_versions: list[dict[str, Any]]
    token_ids: TokenIds = field(repr=False)
    loss_mask: list[int] = field(repr=False)
    log_probs: LogProbs = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Its fields by their names; the arrays are not copied."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def lineage(sequence: Sequence, index: int, count: int) -> dict[str, Any]:
    """How a sequence hangs together with the others of its rollout: fields of ``TrainingRow``."""
    origin, calls = sequence.origin, sequence.calls
    made = [call.continuity for call in calls]
    return {
        "sequence": index,
        "sequences": count,
        "parent": None if origin is None else origin.sequence,
        "parent_token": None if origin is None else origin.token,
        "agent": sequence.agent,
        "purpose": sequence.purpose,
        "segment": sequence.segment,
        "cause": sequence.cause,
        "multimodal": any(map(media_of, calls)),
        "continuity": next((one.policy.value for one in made if one and one.mode is Mode.SPLICED), None),
    }


def details(sequence: Sequence | None) -> dict[str, Any]:
    """Plain fields of ``TrainingRow``; without a sequence all of them are empty."""
    calls = [] if sequence is None else sequence.calls
    last = calls[-1] if calls else None
    modes = {call.log_probs_mode for call in calls}
    return {
        "finish_reason": last.finish_reason if last else None,
        "truncated": last is not None and last.finish_reason == _TRUNCATED,
        "prompt_length": len(calls[0].prompt_token_ids) if calls else 0,
        "turn_spans": [_turn(call) for call in calls],
        "sampling": sampling_fields(last.sampling) if last else None,
        "log_probs_mode": modes.pop() if len(modes) == 1 else None,
        "weight_versions": [span for call in calls for span in _weights(call)],
    }


def sampling_fields(told: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Each parameter that most engines know, null if the request did not set it, and ``other``: the rest as JSON text.

    None if nothing is known of the request's parameters. Fields of one type each can be columns of a table, which
    a stop that is a text here and a list there cannot.
    """
    if told is None:
        return None
    nested = told.get(_NESTED)
    rest = {**told, **nested} if isinstance(nested, dict) else dict(told)
    if isinstance(nested, dict):
        del rest[_NESTED]
    fields: dict[str, Any] = {}
    for name in SAMPLING_NUMBERS:
        known = type(rest.get(name)) in (int, float)
        fields[name] = float(rest.pop(name)) if known else None
    for name in SAMPLING_INTEGERS:
        known = type(rest.get(name)) is int and -_LARGEST <= rest[name] < _LARGEST
        fields[name] = rest.pop(name) if known else None
    rest = {name: value for name, value in rest.items() if value is not None}
    fields["other"] = json.dumps(rest, separators=(",", ":")) if rest else None
    return fields


def _turn(call: TokenEntry) -> dict[str, Any]:
    start = len(call.prompt_token_ids)
    return {
        "start": start,
        "end": start + len(call.generation_token_ids),
        "model_call_id": call.model_call_id,
        "response_id": call.response_id,
        "model": call.model,
    }


def _weights(call: TokenEntry) -> Iterator[dict[str, Any]]:
    """Spans of one weight version each, in tokens of the sequence; none where the engine does not tell."""
    start, length = len(call.prompt_token_ids), len(call.generation_token_ids)
    told = (call.model_extra or {}).get("weight_versions")
    if call.weight_version is not None:
        yield {"start": start, "end": start + length, "version": call.weight_version}
    elif isinstance(told, list):
        # vLLM counts them in tokens of the generation, the end exclusive.
        for span in told:
            if isinstance(span, Mapping) and isinstance(span.get("start"), int) and isinstance(span.get("end"), int):
                first, end = max(0, span["start"]), min(length, span["end"])
                if first < end:
                    yield {"start": start + first, "end": start + end, "version": str(span.get("version"))}


def training_row(rollout_id: str, sequence: Sequence, index: int, count: int) -> TrainingRow:
    """The row of a sequence.

    Raises:
        InvalidEntryError: the sequence is not contiguous.
    """
    return _row(rollout_id, lineage(sequence, index, count), sequence.reason, sequence)


def empty_row(rollout_id: str, reason: str) -> TrainingRow:
    """The row of a rollout that is masked as a whole; ``reason`` is a code."""
    return _row(rollout_id, lineage(Sequence(Chain("")), 0, 1), reason, None)


def _row(rollout_id: str, fields: dict[str, Any], reason: str, sequence: Sequence | None) -> TrainingRow:
    kept = None if reason else sequence
    flat = _NOTHING if kept is None else kept.trajectory()
    return TrainingRow(
        rollout_id=rollout_id,
        **fields,
        **details(kept),
        mask_reason=reason or None,
        token_ids=flat.token_ids,
        loss_mask=flat.loss_mask,
        log_probs=flat.log_probs,
    )
