"""The builder's rules once more, in lists and loops, as slow as they are obvious.

Nothing is shared with the package but the record, so that a mistake in one is no mistake in both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from token_id_capture.records import TokenEntry


@dataclass
class Call:
    call_id: str
    prompt: list[int]
    generation: list[int]
    log_probs: list[float]
    created_at: float
    parent: Call | None = None
    children: list[Call] = field(default_factory=list)

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.generation


@dataclass
class Reference:
    """``paths`` has the call ids of each chain, the main one first."""

    empty: list[str]
    copies: list[str]
    parents: dict[str, str | None]
    paths: list[list[str]]
    quarantined: list[str]
    unresolved: list[str]
    roots: int
    captured: int
    divergences: list[tuple[str, int, str, int, int, bool]]
    token_ids: list[int]
    loss_mask: list[int]
    log_probs: list[float]


def reference_build(entries: list[TokenEntry]) -> Reference:
    ordered = sorted(
        (
            Call(
                entry.model_call_id,
                list(entry.prompt_token_ids),
                list(entry.generation_token_ids),
                list(entry.generation_log_probs),
                entry.created_at,
            )
            for entry in entries
        ),
        key=lambda call: (len(call.prompt), call.call_id),
    )
    empty = [call.call_id for call in ordered if not call.generation]
    calls: list[Call] = []
    copies: list[str] = []
    divergences: list[tuple[str, int, str, int, int, bool]] = []
    for call in ordered:
        if not call.generation:
            continue
        if any(other.prompt == call.prompt and other.generation == call.generation for other in calls):
            copies.append(call.call_id)
            continue
        call.parent = longest_prefix(call, calls)
        if call.parent is not None:
            call.parent.children.append(call)
        calls.append(call)

    told: list[Call] = []
    for call in sorted(calls, key=lambda call: (time_of(call), len(path_to(call)), call.call_id)):
        siblings = [other for other in told if other.parent is call.parent]
        if siblings and all(other.prompt != call.prompt for other in siblings):
            divergences.append(divergence(call, told, calls))
        told.append(call)

    dropped: list[Call] = []
    unresolved: list[Call] = []
    for call in calls:
        answers = [other for other in calls if other.parent is call.parent and other.prompt == call.prompt]
        if len(answers) == 1:
            continue
        continued = [other for other in answers if other.children]
        if not continued:
            unresolved.append(call)
            continued = answers[:1]
        if not any(call is other for other in continued):
            dropped.append(call)

    leaves = [call for call in calls if not call.children and not any(call is other for other in dropped)]
    paths = sorted((path_to(leaf) for leaf in leaves), key=lambda path: (path[0].created_at, path[0].call_id))
    token_ids: list[int] = []
    loss_mask: list[int] = []
    log_probs: list[float] = []
    for call in paths[0] if paths else []:
        assert call.prompt[: len(token_ids)] == token_ids
        context = len(call.prompt) - len(token_ids)
        token_ids = call.sequence
        loss_mask += [0] * context + [1] * len(call.generation)
        log_probs += [0.0] * context + call.log_probs
    return Reference(
        empty=empty,
        copies=copies,
        parents={call.call_id: call.parent.call_id if call.parent else None for call in calls},
        paths=[[call.call_id for call in path] for path in paths],
        quarantined=[call.call_id for call in dropped],
        unresolved=[call.call_id for call in unresolved],
        roots=len({tuple(call.prompt) for call in calls if call.parent is None}),
        captured=sum(len(call.generation) for call in calls),
        divergences=divergences,
        token_ids=token_ids,
        loss_mask=loss_mask,
        log_probs=log_probs,
    )


def longest_prefix(call: Call, earlier: list[Call]) -> Call | None:
    """Of two calls with the same sequence, the later one, which has the longer prompt."""
    best: Call | None = None
    for other in earlier:
        matches = call.prompt[: len(other.sequence)] == other.sequence
        if matches and (best is None or len(other.sequence) >= len(best.sequence)):
            best = other
    return best


def time_of(call: Call) -> float:
    """No call is older than the one that it continues."""
    return max(one.created_at for one in path_to(call))


def divergence(call: Call, before: list[Call], calls: list[Call]) -> tuple[str, int, str, int, int, bool]:
    """The earliest of the calls made before that share most of the prompt without being continued by it."""
    best: tuple[int, Call] | None = None
    for other in before:
        agreed = 0
        while agreed < min(len(call.prompt), len(other.sequence)) and call.prompt[agreed] == other.sequence[agreed]:
            agreed += 1
        if agreed < len(other.sequence) and (best is None or agreed > best[0]):
            best = (agreed, other)
    assert best is not None
    agreed, closest = best
    turn = {id(one): number for number, one in enumerate(calls, 1)}
    where = (closest.call_id, turn[id(closest)], agreed, agreed >= len(closest.prompt))
    return call.call_id, turn[id(call)], *where


def path_to(call: Call) -> list[Call]:
    path = [call]
    while path[0].parent is not None:
        path.insert(0, path[0].parent)
    return path
