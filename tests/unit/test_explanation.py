"""Why a rollout is masked: the tree of its calls, where prompts depart, what that looks like, and the sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.call_trees import call, grow
from token_id_capture.cli.output.tree_text import tree_lines, tree_rows
from token_id_capture.explanation import (
    Cause,
    Decode,
    ExplainedDivergence,
    Role,
    Span,
    Suspicion,
    call_tree,
    explain_divergence,
    suspect,
)
from token_id_capture.records import TokenEntry

SYSTEM = list(range(1000, 1040))
ANSWER = list(range(100, 160))


def divergence_of(entries: Sequence[TokenEntry], decode: Decode | None = None) -> ExplainedDivergence:
    """The one divergence among these calls."""
    tree = call_tree(entries)
    (divergence,) = tree.output.notes.divergences
    return explain_divergence(tree, divergence, decode)


def judged(
    entries: Sequence[TokenEntry], decode: Decode | None = None, lost: int = 0
) -> tuple[ExplainedDivergence, Suspicion]:
    divergence = divergence_of(entries, decode)
    return divergence, suspect(divergence, lost)


def two_turns(second_history: list[int], answer: list[int] = ANSWER) -> list[TokenEntry]:
    """A first call that generated ``answer``, and a second one whose prompt has ``second_history`` behind SYSTEM."""
    return [
        call("first", SYSTEM, answer, created_at=1.0),
        call("second", SYSTEM + second_history, [7], created_at=2.0),
    ]


# The same text for both spellings of a word, and another text for everything else.
SPELLINGS = {105: "wo", 106: "rd", 905: "w", 906: "or", 907: "d"}


def reads(ids: Sequence[int]) -> str:
    return "".join(SPELLINGS.get(token, f"<{token}>") for token in ids)


RETOKENISED = [*ANSWER[:5], 905, 906, 907, *ANSWER[7:], 5, 6]


def test_a_few_other_tokens_within_an_answer_look_like_retokenisation() -> None:
    divergence, suspicion = judged(two_turns(RETOKENISED))
    assert (divergence.call.entry.model_call_id, divergence.earlier.entry.model_call_id) == ("second", "first")
    assert divergence.position == len(SYSTEM) + 5
    assert divergence.sampled_by is divergence.earlier
    assert divergence.span == Span(removed=2, added=3)
    assert suspicion == Suspicion(
        Cause.RETOKENIZATION, "3 tokens stand where 2 were, and then both agree again", certain=False
    )


def test_the_ids_around_the_first_difference_are_told_for_both_sides() -> None:
    divergence = divergence_of(two_turns(RETOKENISED))
    assert divergence.expected() == ([101, 102, 103, 104], [105, 106, 107, 108, 109, 110])
    assert divergence.found() == ([101, 102, 103, 104], [905, 906, 907, 107, 108, 109])


def test_a_tokenizer_settles_whether_the_text_is_the_same() -> None:
    divergence, suspicion = judged(two_turns(RETOKENISED), reads)
    assert divergence.span == Span(removed=2, added=3, same_text=True)
    assert (suspicion.cause, suspicion.certain) == (Cause.RETOKENIZATION, True)
    edited = [*ANSWER[:5], 905, 907, *ANSWER[7:], 5, 6]
    divergence, suspicion = judged(two_turns(edited), reads)
    assert divergence.span == Span(removed=2, added=2, same_text=False)
    assert (suspicion.cause, suspicion.certain) == (Cause.EDITED_HISTORY, True)


def test_retokenisation_at_the_very_end_of_an_answer_is_found_with_and_without_a_tokenizer() -> None:
    entries = two_turns([53122, 393, 30002, 5, 6], answer=[53122, 316, 317])
    divergence, suspicion = judged(entries)
    assert (divergence.span, divergence.position) == (None, len(SYSTEM) + 1)
    assert (suspicion.cause, suspicion.certain) == (Cause.RETOKENIZATION, False)
    texts = {53122: "the", 316: " ca", 317: "t", 393: " c", 30002: "at"}

    def decode(ids: Sequence[int]) -> str:
        return "".join(texts.get(token, f"<{token}>") for token in ids)

    divergence, suspicion = judged(entries, decode)
    assert divergence.span == Span(removed=2, added=2, same_text=True)
    assert (suspicion.cause, suspicion.certain) == (Cause.RETOKENIZATION, True)


def test_a_last_token_alone_looks_like_the_template_ending_a_message_otherwise() -> None:
    _, suspicion = judged(two_turns([*ANSWER[:-1], 5, 6]))
    assert suspicion.cause is Cause.RETOKENIZATION
    assert "chat template ends a message in another way" in suspicion.because


def test_reasoning_left_out_of_the_history_is_an_edit() -> None:
    divergence, suspicion = judged(two_turns([*ANSWER[40:], 5, 6]))
    assert divergence.span == Span(removed=40, added=0)
    assert suspicion.cause is Cause.EDITED_HISTORY
    assert suspicion.because.startswith("40 tokens are missing there")


def test_a_thought_that_is_missing_where_thoughts_are_stored_was_dropped() -> None:
    calls = two_turns([*ANSWER[40:], 5, 6])
    calls[0] = calls[0].model_copy(update={"output_items": [{"type": "message", "reasoning_content": "so"}]})
    _, suspicion = judged(calls)
    assert suspicion.cause is Cause.DROPPED_REASONING
    assert suspicion.because == "40 tokens are missing there, at the start of an answer with which thoughts were stored"
    # A short answer behind the thought counts up to its last token.
    calls[1] = call("second", [*SYSTEM, *ANSWER[-3:], 5, 6, 7], [7], created_at=2.0)
    assert judged(calls)[1].cause is Cause.DROPPED_REASONING


@pytest.mark.parametrize("history", [ANSWER[:5] + ANSWER[8:], [*ANSWER[:5], 7, 7, *ANSWER[5:]]])
def test_an_empty_side_is_never_retokenisation(history: list[int]) -> None:
    assert judged(two_turns([*history, 5, 6]))[1].cause is Cause.EDITED_HISTORY


def test_the_rest_of_a_short_answer_counts_as_agreement() -> None:
    divergence, suspicion = judged(two_turns([100, 7, 8, 102, 103, 5, 6], answer=[100, 101, 102, 103]))
    assert (divergence.span, suspicion.cause) == (Span(removed=1, added=2), Cause.RETOKENIZATION)


def test_another_session_is_a_separate_agent() -> None:
    calls = [
        TokenEntry.model_validate({**one.model_dump(), "session_headers": {"x-session-id": name}})
        for one, name in zip(two_turns([*ANSWER[:5], 905, *ANSWER[6:], 5]), "ab", strict=True)
    ]
    assert judged(calls)[1].cause is Cause.SUB_AGENT


def test_text_put_into_an_answer_is_an_edit() -> None:
    divergence, suspicion = judged(two_turns([*ANSWER[:10], *range(700, 750), *ANSWER[10:], 5]))
    assert divergence.span == Span(removed=0, added=50)
    assert suspicion.cause is Cause.EDITED_HISTORY


def test_another_answer_is_a_lost_call_if_one_was_lost_and_an_edit_if_none_was() -> None:
    entries = two_turns(list(range(400, 500)))
    assert judged(entries, lost=1)[1].cause is Cause.LOST_CALL
    assert "2 calls were lost" in judged(entries, lost=2)[1].because
    assert judged(entries)[1].cause is Cause.EDITED_HISTORY


def conversation(turns: int, start: list[int]) -> list[TokenEntry]:
    """Calls that append 30 tokens of context and 20 of generation each."""
    history, entries = list(start), []
    for turn in range(turns):
        history += [2000 + 100 * turn + n for n in range(30)]
        generation = [5000 + 100 * turn + n for n in range(20)]
        entries.append(call(f"turn-{turn}", history, generation, created_at=float(turn + 1)))
        history = history + generation
    return entries


def test_a_short_prompt_behind_the_same_beginning_is_a_compaction() -> None:
    summary = call("compacted", SYSTEM + list(range(8000, 8060)), [7], created_at=50.0)
    calls = [*conversation(6, SYSTEM), summary]
    # Where nobody tells whose call it is, a prompt without a sampled token may be another agent's.
    assert judged(calls)[1].cause is Cause.SUB_AGENT
    divergence, suspicion = judged([one.model_copy(update={"agent": "main"}) for one in calls])
    assert (divergence.call.entry.model_call_id, divergence.continues) == ("compacted", None)
    assert divergence.position == len(SYSTEM)
    assert divergence.sampled_by is None
    assert divergence.longest_before == len(SYSTEM) + 6 * 50
    assert suspicion.cause is Cause.COMPACTION
    assert (
        "only 100 tokens and none that was sampled, where the conversation had already reached 340" in suspicion.because
    )


def test_a_compaction_behind_the_first_message_is_one_too() -> None:
    turns = conversation(6, SYSTEM)
    summary = call("compacted", [*turns[0].prompt_token_ids, *range(8000, 8060)], [7], created_at=50.0)
    divergence, suspicion = judged([*turns, summary])
    assert divergence.sampled_by is not None
    assert suspicion.cause is Cause.COMPACTION


@pytest.mark.parametrize("length", [20, 200, 2000])
def test_another_system_prompt_is_a_separate_agent_however_long(length: int) -> None:
    agent = call("agent", [*SYSTEM[:3], *range(9000, 9000 + length)], [7], created_at=2.5)
    divergence, suspicion = judged([*conversation(4, SYSTEM), agent])
    # The agent came later, so it is the one that departs, though it is first in order of length.
    assert (divergence.call.entry.model_call_id, divergence.earlier.entry.model_call_id) == ("agent", "turn-0")
    assert divergence.position == 3
    assert suspicion.cause is Cause.SUB_AGENT


def test_a_changed_word_of_an_earlier_prompt_is_an_edited_history() -> None:
    turns = conversation(3, SYSTEM)
    edited = list(turns[2].prompt_token_ids)
    edited[len(SYSTEM) + 5] = 1
    turns[2] = call("turn-2", edited, [7], created_at=3.0)
    divergence, suspicion = judged(turns)
    assert (divergence.earlier.entry.model_call_id, divergence.position) == ("turn-0", len(SYSTEM) + 5)
    assert divergence.span == Span(removed=1, added=1)
    assert suspicion.cause is Cause.EDITED_HISTORY
    assert "an earlier message was changed" in suspicion.because


def test_a_prompt_that_is_cut_short_has_nothing_there() -> None:
    first = call("first", SYSTEM, ANSWER, created_at=1.0)
    more = call("more", SYSTEM + ANSWER + [1, 2, 3], [9], created_at=2.0)
    again = call("again", SYSTEM[:20], [9], created_at=3.0)
    divergence, suspicion = judged([first, more, again])
    assert divergence.call.entry.model_call_id == "again"
    assert divergence.found() == (SYSTEM[16:20], [])
    assert suspicion.cause is Cause.SUB_AGENT


def test_a_branch_names_the_call_that_both_continue() -> None:
    stem = [*SYSTEM, *ANSWER]
    entries = [
        call("stem", SYSTEM, ANSWER, created_at=1.0),
        call("left", [*stem, 1, 2, 3], [7], created_at=2.0),
        call("right", [*stem, 1, 2, 4], [8], created_at=3.0),
    ]
    divergence = divergence_of(entries)
    assert divergence.continues is not None
    assert divergence.continues.entry.model_call_id == "stem"
    assert divergence.position == len(stem) + 2


# The tree


def test_each_call_has_its_place() -> None:
    tree = call_tree(
        [
            call("root", [1, 2], [3], created_at=1.0),
            call("kept", [1, 2, 3, 4], [5]),
            call("retry", [1, 2, 3, 4], [6]),
            call("kept-again", [1, 2, 3, 4], [5]),
            call("last", [1, 2, 3, 4, 5, 7], [8]),
            call("last-again", [1, 2, 3, 4, 5, 7], [9]),
            call("empty", [1, 2, 3, 4], []),
            call("other", [9, 9], [9], created_at=2.0),
        ]
    )
    places = {one.entry.model_call_id: one for one in tree.calls}
    assert {name: (one.number, one.role.value) for name, one in places.items()} == {
        "root": (1, "main"),
        "kept": (2, "main"),
        "retry": (3, "retry"),
        "kept-again": (4, "copy"),
        "last": (5, "unresolved"),
        "last-again": (6, "unresolved"),
        "empty": (7, "empty"),
        "other": (8, "branch"),
    }
    assert places["retry"].parent is places["kept"].parent is places["root"]
    assert places["retry"].same_as is places["kept-again"].same_as is places["kept"]
    assert [one.entry.model_call_id for one in tree.roots] == ["root", "other"]
    assert [*tree_lines(tree)] == [
        "┌ 1",
        "├── 3  another answer to the prompt of 2; left out",
        "├── 4  copy of 2; left out",
        "├ 2",
        "├── 6  one of several answers to a prompt, none continued",
        "└ 5  one of several answers to a prompt, none continued",
        "─ 8  starts anew; differs from 1 at position 0",
        "7  nothing generated; left out",
    ]


def test_choices_of_one_request_are_told_as_choices() -> None:
    tree = call_tree(
        [
            call("first", [1], [2]),
            call("first.1", [1], [3]),
            call("asked-again", [1], [4]),
            call("next", [1, 2, 5], [6]),
            call("next.1", [1, 2, 5], [7]),
            call("v1.0", [1, 2, 5], []),
        ]
    )
    assert [*tree_lines(tree)] == [
        "┌ 1",
        "├── 5  one of several choices of a call, none continued",
        "└ 4  one of several choices of a call, none continued",
        "─ 2  another choice beside 1; left out",
        "─ 3  another answer to the prompt of 1; left out",
        "6  nothing generated; left out",
    ]


def test_a_long_chain_is_one_line() -> None:
    history: list[int] = [1]
    entries = []
    for turn in range(500):
        entries.append(call(f"{turn:04}", list(history), [turn]))
        history += [turn, 2]
    assert [*tree_lines(call_tree(entries))] == ["─ 1-500  main sequence, 1,000 tokens"]


def numbers_in(lines: Sequence[str]) -> list[int]:
    """The numbers of calls at the head of each line, ranges written out."""
    found: list[int] = []
    for line in lines:
        head = re.match(r"[┌├└─│┬ ]*([\d, -]+)", line)
        assert head is not None, line
        for part in head[1].strip(" ,").split(", "):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found


@given(st.binary(max_size=160))
def test_every_call_of_any_rollout_stands_once_in_the_tree_and_below_what_it_continues(choices: bytes) -> None:
    entries = grow(choices)
    tree = call_tree(entries)
    for one in tree.calls:
        if one.parent is not None:
            assert one.entry.prompt_token_ids.startswith(one.parent.sequence)
            assert one in one.parent.children
        if one.same_as is not None:
            assert one.entry.prompt_token_ids == one.same_as.entry.prompt_token_ids
    main = [link.entry.model_call_id for chain in tree.output.chains[:1] for link in chain.links]
    roles = {one.entry.model_call_id: one.role for one in tree.calls}
    assert {roles[call_id] for call_id in main} <= {Role.MAIN, Role.UNRESOLVED}
    assert sorted(numbers_in([*tree_lines(tree)])) == [one.number for one in tree.calls]
    assert [row["number"] for row in tree_rows(tree)] == list(range(1, len(tree.calls) + 1))


@given(st.binary(max_size=160))
def test_every_divergence_of_any_rollout_is_the_first_difference(choices: bytes) -> None:
    tree = call_tree(grow(choices))
    for noted in tree.output.notes.divergences:
        divergence = explain_divergence(tree, noted, reads)
        sequence, prompt = divergence.earlier.sequence, divergence.call.entry.prompt_token_ids
        assert sequence[: divergence.position] == prompt[: divergence.position]
        assert divergence.position < len(sequence)
        assert divergence.position == len(prompt) or sequence[divergence.position] != prompt[divergence.position]
        assert suspect(divergence, 0).because


# The sentences
