"""What a divergence looks like, decided by its facts, and what can be done about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from token_id_capture.explanation.divergences import SHORT_SPAN, ExplainedDivergence

# A conversation that shares less than this part of a first prompt does not share its system prompt.
_OWN_SYSTEM_PROMPT: Final = 0.15


class Cause(StrEnum):
    """Why prompts depart from what came before, as far as is known from practice."""

    RETOKENIZATION = "retokenization"
    """The same text came back as other tokens."""
    EDITED_HISTORY = "edited_history"
    """An earlier message was changed, cut or dropped."""
    COMPACTION = "compaction"
    """The conversation began anew with a shorter account of what went before."""
    SEPARATE_AGENT = "separate_agent"
    """Another conversation under the same rollout id."""
    LOST_CALL = "lost_call"
    """The history holds an answer that was never captured."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A cause and the facts that speak for it. ``certain``: nothing else fits the facts."""

    cause: Cause
    because: str
    certain: bool = False


CAUSE_REMEDIES: Final[dict[Cause, str]] = {
    Cause.RETOKENIZATION: "Nothing is wrong with the harness: text does not always tokenise back to the tokens that "
    "were sampled. Where the engine takes token ids as its prompt, send the earlier ids and only the new text; else "
    "train on each call by itself, with tokcap export --per-request.",
    Cause.EDITED_HISTORY: "Let the harness send every message back as it came. Usual culprits are a chat template or "
    "harness that drops the reasoning of earlier turns, one that trims or rewrites tool results, and an answer that "
    "is parsed and written out again. If that is wanted, train on each call by itself, with tokcap export "
    "--per-request.",
    Cause.COMPACTION: "Switch compaction off or raise the length at which it sets in, or give what follows it a "
    "rollout id of its own. Each call by itself can still be trained on, with tokcap export --per-request.",
    Cause.SEPARATE_AGENT: "Give each agent a rollout id of its own, by its own base URL "
    "(/ng-rollout/<id>/training-token-capture/v1). Calls that need no training, such as titles and summaries, can go "
    "to a URL without that prefix.",
    Cause.LOST_CALL: "Run the rollout again under a new id, and look for what lost the call: tokcap doctor tells "
    "which process it was.",
}


def suspect(divergence: ExplainedDivergence, lost_calls: int) -> Suspicion:
    """The cause that fits the facts best; ``lost_calls`` is how many the rollout is known to have lost."""
    if divergence.sampled_by is not None:
        return _in_an_answer(divergence, lost_calls)
    return _in_a_prompt(divergence)


def _in_an_answer(divergence: ExplainedDivergence, lost_calls: int) -> Suspicion:
    span = divergence.span
    left = divergence.earlier.length - divergence.position
    if span is not None and span.same_text:
        return Suspicion(Cause.RETOKENIZATION, f"{_span(divergence)}, and both read the same", certain=True)
    if span is not None and (span.same_text is False or not span.is_short):
        return Suspicion(
            Cause.EDITED_HISTORY,
            f"{_span(divergence)}, and then both agree again, so a part of the answer was changed or left out",
            certain=span.same_text is False,
        )
    if span is not None:
        return Suspicion(Cause.RETOKENIZATION, f"{_span(divergence)}, and then both agree again")
    if _restarts(divergence):
        return _compaction(divergence)
    if left == 1:
        return Suspicion(
            Cause.RETOKENIZATION,
            "only the last token of the answer is another one, as where a chat template ends a message otherwise "
            "than the engine does",
        )
    if lost_calls:
        return Suspicion(
            Cause.LOST_CALL,
            "another answer stands where the captured one was, and of this rollout "
            f"{'a call was' if lost_calls == 1 else f'{lost_calls} calls were'} lost",
        )
    if left <= SHORT_SPAN and not divergence.decoded:
        return Suspicion(Cause.RETOKENIZATION, f"only the last {left} tokens of the answer differ")
    return Suspicion(Cause.EDITED_HISTORY, "from there on the prompt has nothing in common with the captured answer")


def _in_a_prompt(divergence: ExplainedDivergence) -> Suspicion:
    span = divergence.span
    if span is not None and span.same_text:
        return Suspicion(Cause.RETOKENIZATION, f"{_span(divergence)}, and both read the same", certain=True)
    if span is not None:
        return Suspicion(
            Cause.EDITED_HISTORY,
            f"{_span(divergence)}, and then both agree again, so an earlier message was changed",
            certain=span.same_text is False,
        )
    if divergence.position < _OWN_SYSTEM_PROMPT * divergence.root_prompt_length:
        return Suspicion(
            Cause.SEPARATE_AGENT,
            f"they share only the first {divergence.position:,} of the {divergence.root_prompt_length:,} tokens with "
            "which the other conversation began, so even the system prompt is another one",
        )
    if _restarts(divergence):
        return _compaction(divergence)
    return Suspicion(Cause.EDITED_HISTORY, "an earlier message, which nobody sampled, is another one from there on")


def _restarts(divergence: ExplainedDivergence) -> bool:
    return len(divergence.call.entry.prompt_token_ids) < divergence.longest_before


def _compaction(divergence: ExplainedDivergence) -> Suspicion:
    return Suspicion(
        Cause.COMPACTION,
        f"the beginning is the same, but the prompt has only {len(divergence.call.entry.prompt_token_ids):,} tokens "
        f"where the conversation had already reached {divergence.longest_before:,}",
    )


def _span(divergence: ExplainedDivergence) -> str:
    span = divergence.span
    assert span is not None
    if not span.added:
        return f"{_tokens(span.removed, 'is', 'are')} missing there"
    if not span.removed:
        return f"{_tokens(span.added, 'was', 'were')} put in there"
    return f"{_tokens(span.added, 'stands', 'stand')} where {span.removed:,} {'was' if span.removed == 1 else 'were'}"


def _tokens(number: int, one: str, many: str) -> str:
    return f"1 token {one}" if number == 1 else f"{number:,} tokens {many}"
