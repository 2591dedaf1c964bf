"""The queries that are offered, and a line about each table and view."""

from __future__ import annotations

from typing import Any, Final

from token_id_capture.store.schema import metadata as schema

QUERIES: Final[dict[str, dict[str, str]]] = {
    "what-became-of-rollouts": {
        "title": "What became of rollouts",
        "description": "Rollouts by their state, latest outcome and reason.",
        "sql": (
            "SELECT state, latest_outcome, latest_reason, count(*) AS rollouts,\n"
            "       sum(generated_tokens) AS generated_tokens\n"
            "FROM rollout_overview\nGROUP BY state, latest_outcome, latest_reason\nORDER BY rollouts DESC"
        ),
    },
    "kept-evidence": {
        "title": "Masked and failed rollouts",
        "description": "The latest that are kept, and why.",
        "sql": (
            "SELECT rollout_id, outcome, reason, flags, calls, judged\n"
            "FROM kept_evidence\nORDER BY judged DESC\nLIMIT 200"
        ),
    },
    "outcomes-by-day": {
        "title": "Outcomes by day",
        "description": "What was delivered and masked, with the sampled tokens; retired rollouts count too.",
        "sql": (
            "SELECT date(recorded_at, 'unixepoch') AS day, outcome, reason, count(*) AS outcomes,\n"
            "       sum(json_extract(metrics, '$.generated_tokens_captured')) AS tokens_captured\n"
            "FROM build_outcomes\nGROUP BY day, outcome, reason\nORDER BY day DESC, outcomes DESC"
        ),
    },
    "lost-calls": {
        "title": "Lost calls",
        "description": "Calls that never ended, with the process that began them; of open rollouts they may still run.",
        "sql": (
            "SELECT rollout_id, model_call_id, rollout_state, flags, begun, pid, host, process_last_seen\n"
            "FROM lost_calls\nORDER BY begun DESC\nLIMIT 200"
        ),
    },
    "late-calls": {
        "title": "Calls that came too late",
        "description": "Refused, because their rollout was frozen, retired or deleted.",
        "sql": (
            "SELECT rollout_id, model_call_id, refused_as, seconds_after_freeze, pid, host, attempted\n"
            "FROM late_calls\nORDER BY attempted DESC\nLIMIT 200"
        ),
    },
    "calls-of-a-rollout": {
        "title": "Calls of a rollout",
        "description": "Which call continues which, and how much of each prompt is new.",
        "sql": (
            "SELECT stored_order, turn, model_call_id, parent_call_id, root_call_id, shared_tokens,\n"
            "       new_prompt_tokens, generation_length, finish_reason, model, created\n"
            "FROM call_chain\nWHERE rollout_id = :rollout\nORDER BY stored_order"
        ),
    },
    "tokens-of-a-call": {
        "title": "Tokens of a call",
        "description": "Token by token: what its prompt adds to the call before it, and what was sampled.",
        "sql": (
            "SELECT position, part, token_id\nFROM call_tokens\n"
            "WHERE rollout_id = :rollout AND model_call_id = :call\nORDER BY position"
        ),
    },
}

VIEWS: Final = {
    "rollout_overview": "A rollout a row: its state, its size, what is missing, what became of it.",
    "kept_evidence": "Snapshots that are kept because training on them was refused, and why.",
    "lost_calls": "Calls that were begun and never ended, with the process that began them.",
    "late_calls": "Calls that came after their rollout was closed for writing.",
    "call_chain": "A stored call a row: which call it continues, and how much of its prompt that is.",
    "call_tokens": "One token of a call a row. Name a rollout and a call: there are very many rows.",
}
_HIDDEN: Final = ("alembic_version", "numbers")


def describe_database() -> dict[str, Any]:
    """Datasette's metadata of the database: queries, descriptions, and the schema's comments on columns."""
    tables: dict[str, Any] = {name: {"description": text} for name, text in VIEWS.items()}
    for table in schema.tables.values():
        comments = {column.name: column.comment for column in table.columns if column.comment}
        tables[table.name] = {"columns": comments}
    for name in _HIDDEN:
        tables.setdefault(name, {})["hidden"] = True
    return {"queries": QUERIES, "tables": tables}
