"""What people and commands are told about rollouts: plain data, without tokens."""

from __future__ import annotations

from dataclasses import dataclass

from token_id_capture.lifecycle import UNTOLD, BuildOutcome, CallOrigin, Flag, Intent, LateWrite, Outcome, State


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """One rollout in a line; lengths in tokens, times in seconds since the epoch.

    ``outcome`` and ``reason`` are those of the latest outcome, None if there is none. Of a retired rollout
    ``calls`` and ``generated_tokens`` are what its outcomes counted, None if they counted nothing, and
    ``prompt_tokens_longest`` and ``agents`` are None. ``agents`` counts those that made the stored calls; calls that
    name none are the main agent's. ``causes`` says in words why its sequences began anew, for the latest outcome.
    """

    rollout_id: str
    state: State
    version: int
    snapshot_id: str | None
    calls: int | None
    prompt_tokens_longest: int | None
    generated_tokens: int | None
    flags: int
    open_intents: int
    outcome: Outcome | None
    reason: str | None
    opened_at: float
    agents: int | None = None
    causes: str | None = None


@dataclass(frozen=True, slots=True)
class CallSummary:
    """One stored call, without its tokens.

    ``upstream`` is the address of the engine that served it, None if nobody told.
    ``continuity`` is how its prompt was made with ``--continuity``: the mode, or why the template made it.
    """

    model_call_id: str
    prefix_call_id: str | None
    prefix_length: int
    prompt_length: int
    generation_length: int
    model: str
    finish_reason: str | None
    created_at: float
    upstream: str | None = None
    continuity: str | None = None
    origin: CallOrigin = UNTOLD


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    """Everything stored about one rollout except its tokens."""

    summary: RolloutSummary
    calls: tuple[CallSummary, ...]
    flags: tuple[Flag, ...]
    intents: tuple[Intent, ...]
    outcomes: tuple[BuildOutcome, ...]
    late_writes: tuple[LateWrite, ...]
