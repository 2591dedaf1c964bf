"""What a divergence looks like, decided by its facts, and what can be done about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from token_id_capture.builder.causes import Cause
from token_id_capture.explanation.divergences import ExplainedDivergence


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A cause and the facts that speak for it. ``certain``: nothing else fits the facts."""

    cause: Cause
    because: str
    certain: bool = False


CAUSE_REMEDIES: Final[dict[Cause, str]] = {
    Cause.RETOKENIZATION: "Nothing is wrong with the harness: text does not always tokenise back to the tokens that "
    "were sampled. tokcap serve --continuity prevents it where the engine takes a prompt as token ids. Each sequence "
    "can still be trained on, with tokcap finalize --sequences all.",
    Cause.EDITED_HISTORY: "Let the harness send every message back as it came. Usual culprits are a chat template or "
    "harness that drops the reasoning of earlier turns, one that trims or rewrites tool results, and an answer that "
    "is parsed and written out again. If that is wanted, train on each sequence, with tokcap finalize "
    "--sequences all.",
    Cause.DROPPED_REASONING: "Let the harness send thoughts back with the answer that they belong to, or use a chat "
    "template that keeps them. Each part can still be trained on, with tokcap finalize --sequences all.",
    Cause.AUXILIARY: "Nothing is wrong: it does not mask the main sequence where the harness tells whose call it is. "
    "tokcap finalize --sequences all delivers both.",
    Cause.BRANCH: "If a harness branches on purpose, train on every branch, with tokcap finalize --sequences all.",
    Cause.RETRY: "Give the harness more time before it asks again.",
    Cause.COMPACTION: "Switch compaction off or raise the length at which it sets in, or give what follows it a "
    "rollout id of its own. Both parts can still be trained on, with tokcap finalize --sequences all.",
    Cause.SUB_AGENT: "Train on every agent, with tokcap finalize --sequences all, or give each a rollout id of its "
    "own, by its own base URL (/ng-rollout/<id>/training-token-capture/v1). Calls that need no training, such as "
    "titles and summaries, can go to a URL without that prefix.",
    Cause.LOST_CALL: "Run the rollout again under a new id, and look for what lost the call: tokcap doctor tells "
    "which process it was.",
}


def suspect(divergence: ExplainedDivergence, lost_calls: int) -> Suspicion:
    """The cause that fits the facts best; ``lost_calls`` is how many the rollout is known to have lost."""
    cause, span = divergence.cause, divergence.span
    if span is not None and span.same_text:
        return Suspicion(Cause.RETOKENIZATION, f"{_span(divergence)}, and both read the same", certain=True)
    if span is not None and span.same_text is False and cause is Cause.RETOKENIZATION:
        return Suspicion(Cause.EDITED_HISTORY, _changed(divergence), certain=True)
    guessed = cause is Cause.EDITED_HISTORY or (cause is Cause.RETOKENIZATION and divergence.answer_left > 1)
    if lost_calls and guessed and span is None and divergence.sampled_by is not None:
        lost = "a call was" if lost_calls == 1 else f"{lost_calls} calls were"
        because = f"another answer stands where the captured one was, and of this rollout {lost} lost"
        return Suspicion(Cause.LOST_CALL, because)
    if cause is Cause.RETOKENIZATION and span is None and divergence.decoded and divergence.answer_left > 1:
        return Suspicion(Cause.EDITED_HISTORY, "the end of the answer reads differently", certain=True)
    certain = span is not None and span.same_text is False and cause is Cause.EDITED_HISTORY
    return Suspicion(cause, _because(divergence), certain)


def _because(divergence: ExplainedDivergence) -> str:
    """The facts behind the cause that the builder found."""
    call, span = divergence.call.entry, divergence.span
    if divergence.cause is Cause.SUB_AGENT:
        if call.agent is not None:
            return f"the harness says that agent {call.agent!r} speaks"
        return "it has no sampled token in common with the calls before it"
    if divergence.cause is Cause.AUXILIARY:
        return "it is an auxiliary call: the harness says so, or it offers no tools and nothing continues it"
    if divergence.cause is Cause.BRANCH:
        return "an earlier call was continued in another way before"
    if divergence.cause is Cause.COMPACTION:
        return (
            f"the prompt has only {len(call.prompt_token_ids):,} tokens and none that was sampled, where the "
            f"conversation had already reached {divergence.longest_before:,}"
        )
    if divergence.cause is Cause.DROPPED_REASONING:
        return f"{_span(divergence)}, at the start of an answer with which thoughts were stored"
    if span is None and divergence.cause is Cause.RETOKENIZATION:
        if divergence.answer_left > 1:
            return f"only the last {divergence.answer_left} tokens of the answer differ"
        return (
            "only the last token of the answer differs, as when a chat template ends a message in another way than "
            "the engine"
        )
    if span is None:
        return "from there on the prompt has nothing in common with what stood there"
    if divergence.cause is Cause.RETOKENIZATION:
        return f"{_span(divergence)}, and then both agree again"
    return _changed(divergence)


def _changed(divergence: ExplainedDivergence) -> str:
    what = (
        "an earlier message was changed"
        if divergence.sampled_by is None
        else ("a part of the answer was changed or left out")
    )
    return f"{_span(divergence)}, and then both agree again, so {what}"


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
