"""Calls for the tests: made by hand, or at random with everything that goes wrong in a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st

from token_id_capture.builder.attribution import ScoredAnswer
from token_id_capture.integrations.nemo_gym import scored_answer
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.rebuild import Build, build_snapshot
from token_id_capture.records import TokenEntry
from token_id_capture.tokens import TokenIds


def call(
    call_id: str,
    prompt: Sequence[int],
    generation: Sequence[int],
    log_probs: Sequence[float] | None = None,
    **more: Any,
) -> TokenEntry:
    """A captured call; its log probabilities count down from -0.1 unless given."""
    return TokenEntry(
        rollout_id=more.pop("rollout_id", "r"),
        model_call_id=call_id,
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.1 * (n + 1) for n in range(len(generation))] if log_probs is None else log_probs,
        **more,
    )


def append_only(turns: int, context: int = 3, generated: int = 2, first: int = 5) -> list[TokenEntry]:
    """A rollout that only ever appends. All calls are views of one buffer, as a store reads them."""
    total = first + turns * (context + generated)
    tokens = TokenIds((n * 2654435761) % 50021 for n in range(total))
    entries = []
    for turn in range(turns):
        start = first + turn * (context + generated)
        entries.append(call(f"c{turn:05}", tokens[:start], tokens[start : start + generated], created_at=float(turn)))
    return entries


def grow(choices: bytes) -> list[TokenEntry]:
    """A call tree from a string of choices: calls that continue, fork, retry, copy, cut or ignore others.

    Three tokens make collisions the rule: nested generations, equal sequences cut differently,
    prompts that are prefixes of earlier ones, empty prompts and empty generations. Ids and times
    have nothing to do with the order in which calls were made.
    """
    left = iter(choices)
    made: list[tuple[list[int], list[int]]] = []
    entries: list[TokenEntry] = []

    def choose(options: int) -> int:
        return next(left) % options

    def tokens() -> list[int]:
        code = next(left)  # two bits of length, three tokens
        return [code // 4 % 3, code // 12 % 3, code // 36 % 3][: code % 4]

    with suppress(StopIteration):
        while True:
            way = choose(8) if made else 0
            old_prompt, old_generation = made[-1 - choose(len(made))] if made else ([], [])
            sequence = old_prompt + old_generation
            prompt, generation = old_prompt, tokens()
            if way == 0:
                prompt = tokens()
            elif way <= 3:
                prompt = sequence + tokens()
            elif way == 4 and sequence:
                position = choose(len(sequence))
                prompt = [*sequence[:position], choose(3), *sequence[position + 1 :], *tokens()]
            elif way == 5:
                prompt = sequence[: choose(len(sequence) + 1)]
            elif way == 6:
                generation = old_generation
            name, time = choose(100), choose(3)
            made.append((prompt, generation))
            entries.append(call(f"c{name:02}-{len(made):02}", prompt, generation, created_at=float(time)))
    return entries


def call_trees(max_choices: int = 100) -> st.SearchStrategy[list[TokenEntry]]:
    """Random call trees; about seven choices make a call."""
    return st.binary(min_size=max_choices // 4, max_size=max_choices).map(grow)


def on_one_buffer(entries: list[TokenEntry]) -> list[TokenEntry]:
    """The same calls, each cut out of one common buffer together with those that it starts with."""
    tokens: list[int] = []
    for entry in entries:
        tokens += [*entry.prompt_token_ids, *entry.generation_token_ids]
    buffer = TokenIds(tokens)
    text = buffer.tolist()
    shared = []
    for entry in entries:
        sequence = [*entry.prompt_token_ids, *entry.generation_token_ids]
        start = next(at for at in range(len(text) + 1) if text[at : at + len(sequence)] == sequence)
        middle = start + len(entry.prompt_token_ids)
        views = {
            "prompt_token_ids": buffer[start:middle],
            "generation_token_ids": buffer[middle : start + len(sequence)],
        }
        shared.append(entry.model_copy(update=views))
    return shared


def record(*items: Any, **more: Any) -> ScoredAnswer:
    """What a finished record with these output items says about the scored answer."""
    response = {"output": list(items), **({"id": more.pop("id")} if "id" in more else {})}
    return scored_answer({"response": response, **more})


def build(entries: list[TokenEntry], scored: ScoredAnswer | None = None, **options: Any) -> Build:
    """The build of a frozen rollout with these calls."""
    flags = tuple(options.pop("flags", ()))
    incomplete = options.pop("incomplete", bool(flags))
    return build_snapshot(
        TokenCaptureSnapshot("r", tuple(entries), incomplete, "s", 1, flags), scored=scored, **options
    )
