"""Sequences, attribution and causes: worked trees with what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from support.call_trees import append_only, build, call, call_trees, record
from token_id_capture.builder.attribution import ScoredAnswer
from token_id_capture.lifecycle import MAIN_AGENT, CallOrigin, Flag, Outcome, Purpose, Sequences
from token_id_capture.provenance import Translation
from token_id_capture.rebuild import Build
from token_id_capture.records import TokenEntry

MASKED: list[str] = []
MAIN, ALL = Sequences.MAIN, Sequences.ALL


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"output_items": [{"type": "message", "role": "assistant", "content": text}], **more}


C1 = call("c1", [1, 2], [3, 4], created_at=1.0, response_id="r1", **said("one"))
C2 = call("c2", [1, 2, 3, 4, 5], [6], created_at=2.0, response_id="r2", **said("two"))
C3 = call("c3", [1, 2, 3, 4, 5, 6, 7], [8, 9], created_at=3.0, response_id="r3", **said("done"))
AUX = call("aux", [90, 91], [92], created_at=0.5, response_id="r0", **said("title"))
CHAIN = [C1, C2, C3]
WHOLE = ["c1", "c2", "c3"]

USER = {"role": "user", "content": "next"}
TOOL_RESULT = {"type": "function_call_output", "call_id": "x", "output": "result"}


def model(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def delivered(build: Build) -> list[str]:
    return [one.model_call_id for one in build.main.calls] if build.deliverable else MASKED


def called(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"output_items": [{"role": "assistant", "content": "", "tool_calls": [{"id": "k", "function": function}]}]}


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("patch", '{"input": "*** Begin"}', {"type": "custom_tool_call", "name": "patch", "input": "*** Begin"}),
        ("patch", '{"input": "{\\"a\\":1}"}', {"type": "custom_tool_call", "name": "patch", "input": '{"a": 1}'}),
        ("patch", "*** Begin", {"type": "custom_tool_call", "name": "patch", "input": "*** Begin"}),
        (
            "team__ask",
            '{"a":1}',
            {"type": "function_call", "name": "ask", "namespace": "team", "arguments": '{"a": 1}'},
        ),
        (
            "look",
            '{"a":1}',
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "tool_use", "id": "k", "name": "look", "input": {"a": 1}},
                ],
            },
        ),
    ],
)
def test_a_call_is_found_by_what_its_client_was_told_in_its_own_dialect(
    name: str, arguments: str, item: dict[str, Any]
) -> None:
    tree = [AUX, call("t", [1], [2], response_id="r", **called(name, arguments))]
    scored = record(USER, {"call_id": "k", **item})
    assert delivered(build(tree, scored)) == ["t"]
    assert delivered(build(tree, record(USER, {"call_id": "k", **item, "name": "other", "content": "x"}))) == MASKED


def turn(entry: TokenEntry, agent: str = MAIN_AGENT, **more: Any) -> TokenEntry:
    return entry.model_copy(update={"agent": agent, **more})


@pytest.mark.parametrize(
    ("entries", "scored", "wanted"),
    [
        (CHAIN, None, WHOLE),
        (CHAIN, record(id="r3"), WHOLE),
        ([*CHAIN, AUX], None, MASKED),
        ([*CHAIN, AUX], record(id="r3"), WHOLE),
        ([*CHAIN, AUX], record(model("one"), model("two"), model("done")), WHOLE),
        ([*CHAIN, AUX], record(model("one"), USER, model("two"), TOOL_RESULT, model("done")), WHOLE),
        ([*CHAIN, AUX], record(model("done")), WHOLE),
        ([*CHAIN, AUX], record(USER, model("done")), WHOLE),
        ([*CHAIN, AUX], record(model("done"), id="nobody-knows-it"), WHOLE),
        ([*CHAIN, AUX], record(_ng_terminal_model_call_id="c3"), WHOLE),
        ([*CHAIN, AUX], record(terminal_response_id="r3"), WHOLE),
        ([*CHAIN, AUX], record(id="r3", _ng_terminal_model_call_id="unknown"), WHOLE),
        ([*CHAIN, AUX], record(model("one"), model("two"), model("done"), TOOL_RESULT), MASKED),
        ([*CHAIN, AUX], record(model("one"), model("two"), model("Done.")), MASKED),
        ([*CHAIN, AUX], record(model("done"), id="r1"), MASKED),
        ([*CHAIN, AUX], record(id="r3", _ng_terminal_model_call_id="c2"), MASKED),
        (CHAIN, record(terminal_response_id="nobody-knows-it"), MASKED),
        (CHAIN, record(terminal_response_id="r2", id="r3"), MASKED),
        (CHAIN, record(id="r3", _ng_terminal_model_call_id="c2"), WHOLE),
        (CHAIN, record(id="r2"), ["c1", "c2"]),
    ],
)
def test_the_scored_answer_ends_the_sequence(
    entries: list[TokenEntry], scored: ScoredAnswer | None, wanted: list[str]
) -> None:
    assert delivered(build(entries, scored)) == wanted


A = call("a", [1, 2, 3, 4, 5], [6], response_id="ra", **said("left"))
B = call("b", [1, 2, 3, 4, 5], [7], response_id="rb", **said("right"))
SAME_ID = [C1, A.model_copy(update={"response_id": "rb"}), B]
AGAIN = call("c0", [1, 2], [5], created_at=0.9, response_id="r9", **said("none"))
COPY = call("c9", [1, 2], [3, 4], created_at=1.5, response_id="r8", **said("one"))


@pytest.mark.parametrize(
    ("entries", "scored", "wanted"),
    [
        ([C1, A, B], record(id="rb"), ["c1", "b"]),
        ([C1, A, B], record(id="ra"), ["c1", "a"]),
        (SAME_ID, record(model("right"), id="rb"), ["c1", "b"]),
        ([C1, A, B], None, MASKED),
        ([*CHAIN, AGAIN], None, WHOLE),
        ([*CHAIN, AGAIN], record(id="r3"), WHOLE),
        ([*CHAIN, COPY], None, WHOLE),
        ([*CHAIN, COPY], record(id="r3"), WHOLE),
    ],
)
def test_the_scored_answer_decides_between_retries(
    entries: list[TokenEntry], scored: ScoredAnswer | None, wanted: list[str]
) -> None:
    assert delivered(build(entries, scored)) == wanted


SUB = call("s1", [1, 2, 3, 4, 70], [71], created_at=1.2, **said("sub"))
DRIFTED = [
    call("d1", list(range(100, 130)), [3, 4, 5], created_at=1.0, response_id="r1"),
    call("d2", [*range(100, 130), 3, 9, 9, 5, *range(50)], [6], created_at=2.0, response_id="r2"),
    call("d3", [*range(100, 130), 3, 9, 9, 5, *range(50), 6, 7], [8], created_at=3.0, response_id="r3"),
]
COMPACTED = [
    *append_only(4),
    call("z1", [*append_only(1)[0].prompt_token_ids, 7], [8], created_at=9.0, response_id="rz"),
]


def test_a_sub_agent_that_branches_off_masks_only_where_nobody_is_known() -> None:
    assert delivered(build([*CHAIN, SUB], record(id="r3"))) == WHOLE
    assert delivered(build([*CHAIN, SUB])) == MASKED
    told = [*map(turn, CHAIN), turn(SUB, "explore", parent_agent=MAIN_AGENT)]
    assert delivered(build(told)) == WHOLE
    [main, sub] = build(told, sequences=ALL).rows
    assert (sub.agent, sub.cause, [one.model_call_id for one in sub.trained_calls]) == ("explore", "sub_agent", ["s1"])
    assert (sub.origin.sequence, sub.origin.token) == (0, 4) if sub.origin else None
    assert main.trained == (True, True, True)


@pytest.mark.parametrize(
    "title",
    [turn(AUX, purpose=Purpose.AUXILIARY), turn(AUX, offers_tools=False), turn(AUX, purpose=Purpose.PREWARM)],
)
def test_a_title_call_masks_nothing_and_is_a_sequence_of_its_own(title: TokenEntry) -> None:
    calls = [title, *(turn(one, offers_tools=True) for one in CHAIN)]
    assert delivered(build(calls)) == WHOLE
    [main, aside] = build(calls, sequences=ALL).rows
    assert (main.cause, aside.cause, aside.beside) == (None, "auxiliary", True)


def test_what_follows_a_retokenised_answer_is_delivered_if_it_was_scored() -> None:
    masked = build(DRIFTED)
    assert (masked.reason, masked.causes) == ("multiple_roots", {"retokenization": 1})
    assert delivered(build(DRIFTED, record(id="r3"))) == ["d2", "d3"]
    first, second = build(DRIFTED, record(id="r3"), sequences=ALL).rows[::-1]
    assert (first.cause, [one.model_call_id for one in first.calls]) == (None, ["d1"])
    assert [one.model_call_id for one in second.calls] == ["d2", "d3"]
    [first, second] = build(DRIFTED, sequences=ALL).rows
    assert (second.cause, second.origin.token if second.origin else None) == ("retokenization", 31)


def test_a_compaction_starts_a_segment() -> None:
    assert delivered(build(COMPACTED)) == MASKED
    assert delivered(build(COMPACTED, record(id="rz"))) == ["z1"]
    [first, second] = build([turn(one) for one in COMPACTED], sequences=ALL).rows
    assert (first.segment, second.segment, second.cause) == (0, 1, "compaction")


def test_a_compacted_prompt_that_ends_as_the_first_one_did_is_no_edited_history() -> None:
    system, reminder = list(range(100, 160)), list(range(200, 260))
    first = call("c1", [*system, 1, *reminder], [2, 3], created_at=1.0)
    second = call("c2", [*first.prompt_token_ids, 2, 3, *range(300, 400)], [4, 5], created_at=2.0)
    compacted = call("c3", [*system, 6, 7, *reminder], [8], created_at=3.0)
    [_, last] = build([turn(one) for one in (first, second, compacted)], sequences=ALL).rows
    assert last.cause == "compaction"
    edited = call("c3", [*system, 6, 7, *reminder, 2, 3], [8], created_at=3.0)
    [_, last] = build([turn(one) for one in (first, second, edited)], sequences=ALL).rows
    assert last.cause == "edited_history"


def test_a_scored_answer_without_tokens_masks_everything() -> None:
    empty = call("c4", [1, 2, 3], [], response_id="r4")
    for sequences in (MAIN, ALL):
        masked = build([C1, empty], record(id="r4"), sequences=sequences)
        assert (masked.outcome, masked.reasons) == (Outcome.MASKED, ("not_captured: c4",))
    assert delivered(build([C1, empty])) == ["c1"]


def test_the_same_text_at_two_depths_says_nothing() -> None:
    twice = [C1, C2.model_copy(update=said("done")), C3]
    assert delivered(build(twice, record(model("done")))) == WHOLE


def test_the_id_that_the_client_was_shown_is_a_witness_too() -> None:
    shown = [C1, C2.model_copy(update={"translation": Translation("messages", "their-model", "msg_2")}), C3]
    assert delivered(build(shown, record(id="msg_2"))) == ["c1", "c2"]
    assert delivered(build(shown, ScoredAnswer(declared_response_id="msg_2"))) == ["c1", "c2"]


def test_tool_calls_are_compared_as_what_they_mean() -> None:
    function = {"name": "ls", "arguments": '{"a": 1, "b": [2]}'}
    items = [{"type": "message", "role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": function}]}]
    called = [C1, C2.model_copy(update={"output_items": items}), C3]
    echoed = {"type": "function_call", "call_id": "x", "name": "ls", "arguments": '{"b":[2],"a":1}'}
    assert delivered(build(called, record({"role": "user", "content": "go"}, echoed))) == ["c1", "c2"]
    assert delivered(build(called, record(USER, {**echoed, "call_id": "y"}))) == WHOLE


# What masks


def lost(agent: str | None, **origin: Any) -> Flag:
    return Flag("gone", "call_lost", "", origin=CallOrigin(agent, **origin))


AGENTS = [*map(turn, CHAIN), turn(call("s1", [50, 51], [52], created_at=4.0), "explore")]


@pytest.mark.parametrize(
    ("flag", "main", "rows"),
    [
        (lost("explore"), WHOLE, [True, False]),
        (lost(MAIN_AGENT), MASKED, [False, True]),
        (lost(None), MASKED, [False, False]),
        (lost(MAIN_AGENT, purpose=Purpose.AUXILIARY), WHOLE, [True, True]),
        (Flag("s1", "conflicting_payload", "", origin=CallOrigin("explore")), WHOLE, [True, False]),
    ],
)
def test_a_lost_call_masks_the_sequences_of_its_own_agent(flag: Flag, main: list[str], rows: list[bool]) -> None:
    assert delivered(build(AGENTS, flags=[flag])) == main
    assert [not row.reasons for row in build(AGENTS, flags=[flag], sequences=ALL).rows] == rows
    assert delivered(build(AGENTS, incomplete=True)) == MASKED


def test_an_attributed_rollout_is_masked_by_a_lost_call_unless_it_is_anothers() -> None:
    assert delivered(build(AGENTS, record(id="r3"), flags=[lost("explore")])) == WHOLE
    assert build(AGENTS, record(id="r3"), flags=[lost(MAIN_AGENT)]).reason == "capture_incomplete"


def test_a_masked_sequence_takes_no_loss_from_the_others() -> None:
    branches = [turn(C1), turn(C2), turn(SUB, "explore")]
    flags = [lost(MAIN_AGENT)]
    [main, sub] = build(branches, flags=flags, sequences=ALL).rows
    assert main.reasons
    assert [one.model_call_id for one in sub.trained_calls] == ["c1", "s1"]


# Models


def of_model(entry: TokenEntry, name: str) -> TokenEntry:
    return entry.model_copy(update={"model": name})


MIXED = [of_model(C1, "policy-1"), of_model(C2, "judge"), of_model(C3, "policy-1")]


def test_a_sequence_of_two_models_is_masked_unless_somebody_says_which_to_train() -> None:
    for sequences in (MAIN, ALL):
        masked = build(MIXED, sequences=sequences)
        assert (masked.outcome, masked.reasons) == (Outcome.MASKED, ("several_models: judge, policy-1",))
        named = build(MIXED, sequences=sequences, models=["policy-*"])
        assert named.trajectory().loss_mask == [0, 0, 1, 1, 0, 0, 0, 1, 1]
        assert named.trajectory().token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert build(MIXED, models=["nobody"]).reasons == ("other_models: judge, policy-1",)
    items = build(MIXED, models=["judge"]).response()["output"]
    assert ["generation_token_ids" in item for item in items] == [False, True, False]


def test_an_agent_of_another_model_is_not_trained_beside_the_main_one_unless_it_is_named() -> None:
    calls = [*(turn(of_model(one, "large")) for one in CHAIN), turn(of_model(SUB, "small"), "explore")]
    assert delivered(build(calls)) == WHOLE
    [main, sub] = build(calls, sequences=ALL).rows
    assert (main.reasons, sub.reason) == ((), "several_models")
    [main, sub] = build(calls, sequences=ALL, models=["large", "small"]).rows
    assert [one.model_call_id for one in sub.trained_calls] == ["s1"]


# Partial rollouts


def test_an_aborted_answer_that_is_taken_up_at_its_last_token_is_one_generation() -> None:
    cut, rest = call("a", [1, 2, 3], [10, 11], finish_reason="abort"), call("b", [1, 2, 3, 10, 11], [12, 13])
    resumed = build([cut, rest])
    assert resumed.trajectory().token_ids == [1, 2, 3, 10, 11, 12, 13]
    assert resumed.trajectory().loss_mask == [0, 0, 0, 1, 1, 1, 1]
    answered = call("b", [1, 2, 3, 10, 11, 5], [12, 13])
    assert build([cut, answered]).reasons == ("aborted_call: a",)


def test_an_aborted_answer_beside_a_finished_one_is_no_second_answer() -> None:
    cut, finished = call("a", [1, 2, 3], [10, 11], finish_reason="abort"), call("b", [1, 2, 3], [12, 13])
    assert delivered(build([cut, finished])) == ["b"]
    assert build([cut, finished, call("c", [1, 2, 3], [14])]).reasons == ("unresolved_retry: b, c",)
    [main, other] = build([cut, finished], sequences=ALL).rows
    assert ([one.model_call_id for one in main.calls], other.cause, other.reason) == (["b"], "retry", "aborted_call")


# Every sequence


@settings(max_examples=300, deadline=None)
@given(call_trees())
def test_every_sampled_token_has_loss_in_exactly_one_row(entries: list[TokenEntry]) -> None:
    every = build(entries, sequences=ALL)
    if not every.rows:
        assert not any(len(one.generation_token_ids) for one in entries)
        return
    trained = [one.model_call_id for row in every.rows for one in row.trained_calls]
    assert len(trained) == len(set(trained))
    output = every.output
    assert output is not None
    assert set(trained) == set(output.parents) - set(output.notes.copied_calls)
    rows = [*every.training_rows()]
    assert sum(sum(row.loss_mask) for row in rows) == every.metrics["generated_tokens_captured"]
    for row in every.rows:
        row.chain.validate()
    for number, one in enumerate(rows):
        assert (one.sequence, one.sequences) == (number, len(rows))
        assert one.parent != number
        if one.parent is not None and one.parent_token is not None:
            shared = rows[one.parent].token_ids
            assert shared[: one.parent_token] == one.token_ids[: one.parent_token]
            rest, other = shared[one.parent_token :], one.token_ids[one.parent_token :]
            assert rest[:1] != other[:1] or not rest
    main = build(entries)
    if main.deliverable:
        assert main.trajectory() == every.rows[0].trajectory()
