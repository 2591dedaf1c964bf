"""Every reason that the program records, with one sentence that explains it.

A reason marks a rollout incomplete (``incomplete_flags.reason``), or says why a build was masked or
its evidence released (``build_outcomes.reason``). Where a reason needs particulars, they follow after
``": "``, as in ``token_count_mismatch: 5 token ids, 12 completion tokens``; the store keeps the two
parts of a flag's in the columns ``reason`` and ``detail``.
"""

from __future__ import annotations

from typing import Final

CALL_LOST: Final = "call_lost"
CAPTURE_FAILED: Final = "capture_failed"
CONFLICTING_PAYLOAD: Final = "conflicting_payload"
ID_MISMATCH: Final = "id_mismatch"
INVALID_TOKENS: Final = "invalid_tokens"
LOG_PROB_PLACEHOLDER: Final = "log_prob_placeholder"
LOST_STREAM: Final = "lost_stream"
NO_TOKEN_IDS: Final = "no_token_ids"
OPEN_IN_BACKUP: Final = "open_in_backup"
STORE_FAILED: Final = "store_failed"
TOKEN_COUNT_MISMATCH: Final = "token_count_mismatch"
UNCAPTURED_ENDPOINT: Final = "uncaptured_endpoint"
UNKNOWN_OUTCOME: Final = "unknown_outcome"
UNSPECIFIED: Final = "unspecified"

ABORTED_CALL: Final = "aborted_call"
BUILD_FAILED: Final = "build_failed"
CAPTURE_INCOMPLETE: Final = "capture_incomplete"
EMPTY_GENERATIONS: Final = "empty_generations"
FREEZE_FAILED: Final = "freeze_failed"
INVALID_ROLLOUT_ID: Final = "invalid_rollout_id"
MULTIPLE_CHAINS: Final = "multiple_chains"
MULTIPLE_ROOTS: Final = "multiple_roots"
NO_CAPTURE_KEY: Final = "no_capture_key"
NOT_CAPTURED: Final = "not_captured"
NOTHING_RECORDED: Final = "nothing_recorded"
OTHER_MODELS: Final = "other_models"
SEVERAL_MODELS: Final = "several_models"
UNKNOWN_SCORED_ANSWER: Final = "unknown_scored_answer"
UNRESOLVED_RETRY: Final = "unresolved_retry"

CONTINUITY_FAILED: Final = "continuity_failed"
ENDS_WITH_ANSWER: Final = "ends_with_answer"
ENGINE_IGNORED_IDS: Final = "engine_ignored_ids"
FIRST: Final = "first"
MEDIA: Final = "media"
NO_ROOM: Final = "no_room"
PROMPT_FIELD: Final = "prompt_field"
REASONING_EDITED: Final = "reasoning_edited"
RENDER_DIFFERS: Final = "render_differs"
RENDER_FAILED: Final = "render_failed"
STOP_TOKEN_UNKNOWN: Final = "stop_token_unknown"
TAIL_DIFFERS: Final = "tail_differs"
TEMPLATE_IGNORES_ANSWER: Final = "template_ignores_answer"
TEXT_DIFFERS: Final = "text_differs"
UNKNOWN_HISTORY: Final = "unknown_history"

DELETED_BY_HAND: Final = "deleted_by_hand"
PRUNED: Final = "pruned"
RETIRED_BY_HAND: Final = "retired_by_hand"

FLAG_REASONS: Final[dict[str, str]] = {
    CALL_LOST: "The call was begun and no tokens of it were ever stored: its process died or was cut off.",
    CAPTURE_FAILED: "The response was there, but reading its tokens failed on an unexpected error.",
    CONFLICTING_PAYLOAD: "One call id arrived with two different payloads; the first one was kept.",
    ID_MISMATCH: "An entry named another rollout or call than the request that it belongs to.",
    INVALID_TOKENS: "The response carried token data that is malformed, partial or ambiguous.",
    LOG_PROB_PLACEHOLDER: "The engine sent a placeholder (-9999 or less) where a log probability should be.",
    LOST_STREAM: "The response broke off before its end, or its client left and the engine did not finish in time.",
    NO_TOKEN_IDS: "The engine answered without token ids or log probabilities.",
    OPEN_IN_BACKUP: "The rollout was open when this file was copied, so calls that came after it are not in it.",
    STORE_FAILED: "The tokens were there, but the database refused to store them.",
    TOKEN_COUNT_MISMATCH: "Token ids, log probabilities and the engine's own count differ in number.",
    UNCAPTURED_ENDPOINT: "The call went to an endpoint that can generate but is not captured.",
    UNKNOWN_OUTCOME: "The engine failed after the request was sent, so what it generated is unknown.",
    UNSPECIFIED: "The rollout was marked incomplete without a reason.",
}

BUILD_REASONS: Final[dict[str, str]] = {
    ABORTED_CALL: "The engine cut a call of the sequence off (abort, error, content_filter, ...), so the policy never "
    "finished that answer.",
    BUILD_FAILED: "The captured calls could not be joined to a sequence.",
    CAPTURE_INCOMPLETE: "At least one call of the rollout was lost or flagged; the flags say which and why.",
    EMPTY_GENERATIONS: "No captured call has a generated token, so there is nothing to train on.",
    FREEZE_FAILED: "The rollout could not be frozen.",
    INVALID_ROLLOUT_ID: "The rollout id is malformed, so nothing can be looked up under it.",
    MULTIPLE_CHAINS: "The calls branch, so they form more than one sequence and none is the obvious one.",
    MULTIPLE_ROOTS: "A prompt continues no earlier call: the history was edited, compacted or re-tokenised, "
    "or a separate agent spoke.",
    NO_CAPTURE_KEY: "The record has neither a rollout id nor task and rollout indices.",
    NOT_CAPTURED: "The response that was scored generated no tokens, so its reward belongs to nothing captured.",
    NOTHING_RECORDED: "No call of this rollout was recorded.",
    OTHER_MODELS: "Only other models than --models names sampled the sequence.",
    SEVERAL_MODELS: "Several models sampled the sequences, and nothing says which one is trained.",
    UNKNOWN_SCORED_ANSWER: "The record declares which response was scored, and no single call has it.",
    UNRESOLVED_RETRY: "The last call was answered more than once and nothing says which answer was used.",
}

RELEASE_REASONS: Final[dict[str, str]] = {
    DELETED_BY_HAND: "The rollout was deleted whatever its state, before its id was used again.",
    PRUNED: "The evidence was older than an administrator wanted to keep it, and tokcap prune deleted it.",
    RETIRED_BY_HAND: "The rollout was retired whatever its state, by a call of the store's retire.",
}


CONTINUITY_REASONS: Final[dict[str, str]] = {
    CONTINUITY_FAILED: "Deciding on the prompt failed on an unexpected error, which is in the log.",
    ENDS_WITH_ANSWER: "The last message is an answer that the policy must continue.",
    ENGINE_IGNORED_IDS: "The engine read another prompt than the one that was sent, so continuity was turned off.",
    FIRST: "The request restates no answer, so there is nothing to continue.",
    MEDIA: "A message holds something other than text.",
    NO_ROOM: "The exact tokens do not fit into the context length of the model, and the template's prompt does.",
    PROMPT_FIELD: "The request says itself how its prompt is made.",
    REASONING_EDITED: "An answer came back with other reasoning than was captured.",
    RENDER_DIFFERS: "The engine's tokenizer endpoint does not give the prompt that its chat endpoint read.",
    RENDER_FAILED: "The engine did not render the messages, or not in time.",
    STOP_TOKEN_UNKNOWN: "The template does not write the token with which the policy ended its turn.",
    TAIL_DIFFERS: "The template writes something else after the answer in the real conversation than in a short one.",
    TEMPLATE_IGNORES_ANSWER: "The template writes nothing of the answer, so the place behind it cannot be found.",
    TEXT_DIFFERS: "The exact tokens decode to another text than the template's prompt, which the policy 'template' "
    "forbids.",
    UNKNOWN_HISTORY: "No answer in the history is one that was captured: it was edited, or is of another agent.",
}


def split_reason(text: str) -> tuple[str, str]:
    """Split ``"reason: particulars"`` into the reason and its particulars (either may be empty)."""
    reason, _, detail = text.partition(": ")
    return reason, detail
