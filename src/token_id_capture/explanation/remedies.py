"""What to do about each reason that this package records. Pure."""

from __future__ import annotations

from typing import Final

from token_id_capture import reasons

SENTENCES: Final[dict[str, str]] = {
    **reasons.FLAG_REASONS,
    **reasons.BUILD_REASONS,
    **reasons.RELEASE_REASONS,
}

_AGAIN: Final = "Run the rollout again under a new id."

REMEDIES: Final[dict[str, str]] = {
    reasons.CALL_LOST: f"{_AGAIN} tokcap doctor tells which process lost the call and whether it still runs; its log "
    "of that time says why. If it was cut off and not killed, give the harness and every proxy on the way more time.",
    reasons.CAPTURE_FAILED: f"{_AGAIN} The server's log has the traceback. If it happens again, it is a fault of this "
    "package: report it with the response that caused it.",
    reasons.CONFLICTING_PAYLOAD: "Find the code that stores one call twice. Every request needs its own call id, "
    "and so does every retry; within a server, current_capture_context() has it.",
    reasons.ID_MISMATCH: "Store an entry within the request that it belongs to, under the ids of "
    "current_capture_context().",
    reasons.INVALID_TOKENS: "Look at the engine's response: exactly one item has to carry prompt ids, generated ids "
    "and log probabilities, all three and whole. A newer engine, or another parser, often fixes it.",
    reasons.LOG_PROB_PLACEHOLDER: "Engines send it for a sampled token whose probability they cut to zero, as with "
    "processed log probabilities and top-k or top-p, or whose probability they do not "
    "know. Ask for raw log probabilities, or sample without the cut.",
    reasons.LOST_STREAM: f"{_AGAIN} Where the client hung up, let the harness wait longer, or the gateway for the "
    f"engine (TOKCAP_DRAIN_SECONDS). Otherwise, look at the engine's log for a crash or a "
    f"restart, and at everything between it and the gateway for a limit on the time of a stream.",
    reasons.NO_TOKEN_IDS: "Check that the engine is new enough to return token ids and log probabilities, and that the "
    "call went to it through the gateway, which asks for them.",
    reasons.OPEN_IN_BACKUP: f"{_AGAIN} If nothing was captured after the copy was made, make it again with tokcap "
    "backup --no-flag-open while no process writes.",
    reasons.STORE_FAILED: "tokcap doctor shows the state of the file. A full disk is the usual cause: free some "
    "space, and run the rollout again under a new id.",
    reasons.TOKEN_COUNT_MISMATCH: "Some of the response's tokens got lost within the engine, usually in the streaming "
    "of its tool or reasoning parser. Update the engine, switch that parser off, or do not stream.",
    reasons.UNCAPTURED_ENDPOINT: "Let the harness use chat completions or completions; if the call is not meant for "
    "training, send it to a URL without the rollout's prefix.",
    reasons.UNKNOWN_OUTCOME: f"{_AGAIN} The engine's log of that time says why it failed, or why it took too long.",
    reasons.UNSPECIFIED: "Ask the program that marked it. Pass mark_incomplete one of the reasons of "
    "token_id_capture.reasons, and the details.",
    reasons.ABORTED_CALL: "Let running requests finish before weights are updated or the engine is paused, or pause it "
    "in a way that keeps them. Then run the rollout again under a new id.",
    reasons.BUILD_FAILED: "tokcap verify tells whether the file is damaged. If it is not, the error above says what "
    "the builder refused.",
    reasons.CAPTURE_INCOMPLETE: "Fix the cause of the calls named here. The rollout itself cannot be repaired: what "
    "was not captured is gone. Its evidence is kept until tokcap prune --evidence, or an "
    "administrator, releases it.",
    reasons.EMPTY_GENERATIONS: "The engine ended each answer before its first token. Look at the token limit, the stop "
    "strings and the chat template.",
    reasons.FREEZE_FAILED: "The error above says why the database refused. tokcap doctor shows the state of the file.",
    reasons.INVALID_ROLLOUT_ID: "Use letters, digits, '.', '_' and '-', starting with a letter or digit, at most 200 "
    "characters.",
    reasons.MULTIPLE_CHAINS: "If a harness branches on purpose, train on every sequence, with tokcap finalize "
    "--sequences all, or give each branch a rollout id of its own.",
    reasons.MULTIPLE_ROOTS: "Fix the cause of each prompt that starts anew. Each sequence can still be trained "
    "on, with tokcap finalize --sequences all.",
    reasons.NO_CAPTURE_KEY: "Give the record _ng_rollout_id, or both _ng_task_index and _ng_rollout_index, as when it "
    "was dispatched.",
    reasons.NOT_CAPTURED: "Look at the token limit and the stop strings of the call that was scored. If another "
    "response was scored, let the record name it.",
    reasons.OTHER_MODELS: "Name the model in --models, or leave the sequence out.",
    reasons.SEVERAL_MODELS: "Say with --models which models to train: the tokens of the others stay in the sequence "
    "as context without loss.",
    reasons.UNKNOWN_SCORED_ANSWER: "Check terminal_response_id of the record: it must be the id of the response as "
    "the engine gave it, or as the client was shown it.",
    reasons.NOTHING_RECORDED: "Check that the harness called .../ng-rollout/<id>/training-token-capture/v1 with this "
    "very id, that the gateway was there, and that this is the database it writes to.",
    reasons.UNRESOLVED_RETRY: "Give the harness more time before it asks again, or let it continue from an answer: a "
    "later call that continues one settles which was used. Each answer by itself can still be trained on, with tokcap "
    "export --per-request.",
    reasons.DELETED_BY_HAND: "Nothing is left to do; the id may be used again.",
    reasons.RETIRED_BY_HAND: "Nothing is left to do. tokcap delete frees its id, should it be used again.",
    reasons.PRUNED: "Nothing is left to do. A longer --older-than keeps evidence longer.",
}

# About unresolved_retry, where the harness asked for several answers at once.
CHOICES: Final = "The last call asked for several choices (n > 1) and nothing says which of them was used."
ONE_CHOICE: Final = (
    "Let the harness continue from one of the choices, or ask for one (n = 1) and give each sample a rollout id of its "
    "own. Each choice by itself can still be trained on, with tokcap export --per-request."
)

# About nothing_recorded, where something is known of the rollout: the harness has its URL right.
CALLED_AND_LOST: Final = "The harness called the right URL. Fix the cause of the calls named above."
CALLED_AND_REFUSED: Final = (
    "The engine refused each call. tokcap show has the status, and the harness or the engine's log says why; after "
    "a 404, check the path behind /training-token-capture and the model's name."
)
CALLED_TOO_LATE: Final = "The harness called the right URL, but too late. Finalize a rollout once its agent has ended."
