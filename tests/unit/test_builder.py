"""The builder's rules on calls made by hand and on recorded chains of a real engine."""

from __future__ import annotations

import gc
import json
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from support.call_trees import append_only, call
from token_id_capture.builder import (
    Chain,
    prefix_merging,
    project_chain_trajectory,
    project_main_chain_trajectory,
)
from token_id_capture.errors import ConflictingEntryError, InvalidEntryError
from token_id_capture.records import TokenEntry

RECORDED = Path(__file__).parents[1] / "data" / "recordings" / "vllm-0.32.0"


def recorded(chain: str) -> list[TokenEntry]:
    """The calls of a recorded chain in the order in which they were made; the file name is the id."""
    entries: list[TokenEntry] = []
    for path in sorted((RECORDED / chain).glob("*.response.json")):
        body = json.loads(path.read_bytes())["body"]
        choice = body["choices"][0]
        entries.append(
            call(
                path.name.removesuffix(".response.json"),
                body["prompt_token_ids"],
                choice["token_ids"],
                [token["logprob"] for token in choice["logprobs"]["content"]],
                finish_reason=choice["finish_reason"],
                created_at=float(len(entries)),
            )
        )
    assert entries
    return entries


def ids(chain: Chain) -> list[str]:
    return [link.entry.model_call_id for link in chain.links]


def test_separators_and_end_tokens_of_the_template_are_context() -> None:
    output = prefix_merging(
        [
            call("a", [1, 2], [3, 4, 99], [-0.3, -0.4, -0.9]),
            call("b", [1, 2, 3, 4, 99, 198, 5, 6], [7, 99], [-0.7, -0.8]),
        ]
    )
    trajectory = project_main_chain_trajectory(output)
    assert trajectory.token_ids == [1, 2, 3, 4, 99, 198, 5, 6, 7, 99]
    assert trajectory.loss_mask == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert trajectory.log_probs == [0.0, 0.0, -0.3, -0.4, -0.9, 0.0, 0.0, 0.0, -0.7, -0.8]
    assert output.chains[0].links[1].interstitial == [198, 5, 6]


def test_an_end_token_that_the_engine_dropped_is_context() -> None:
    output = prefix_merging([call("a", [1, 2], [3, 4]), call("b", [1, 2, 3, 4, 99, 198, 5, 6], [7, 99])])
    trajectory = project_main_chain_trajectory(output)
    assert trajectory.token_ids == [1, 2, 3, 4, 99, 198, 5, 6, 7, 99]
    assert trajectory.loss_mask == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1]


def test_a_retokenised_history_is_not_merged_and_its_place_is_told() -> None:
    output = prefix_merging([call("a", [1, 2], [53122, 316]), call("b", [1, 2, 393, 30002, 9], [7])])
    assert [ids(chain) for chain in output.chains] == [["a"], ["b"]]
    assert output.notes.roots == 2
    (divergence,) = output.notes.divergences
    assert (divergence.model_call_id, divergence.turn, divergence.position) == ("b", 2, 2)
    assert (divergence.closest_call_id, divergence.closest_turn, divergence.in_generation) == ("a", 1, True)
    assert (divergence.expected_token_id, divergence.found_token_id) == (53122, 393)
    assert str(divergence) == (
        "turn 2 (call b) departs from turn 1 (call a) at position 2 of 4, in its generation: "
        "token 53122 there, the prompt has 393"
    )


def test_recorded_drift_is_found_at_turn_3_position_73() -> None:
    output = prefix_merging(recorded("chain-drift"))
    (divergence,) = output.notes.divergences
    assert (divergence.turn, divergence.position, divergence.closest_turn) == (3, 73, 2)
    assert (divergence.closest_length, divergence.in_generation) == (103, True)
    assert divergence.parent_call_id == "01-turn1"
    assert [ids(chain) for chain in output.chains] == [
        ["01-turn1", "02-turn2"],
        ["01-turn1", "03-turn3", "04-turn4", "05-turn5"],
    ]


def test_a_recorded_compaction_starts_a_second_root_that_differs_in_the_prompt() -> None:
    output = prefix_merging(recorded("chain-compacted"))
    assert output.notes.roots == 2
    assert [ids(chain) for chain in output.chains] == [["01-turn1", "02-turn2", "03-turn3"], ["04-turn4", "05-turn5"]]
    (divergence,) = output.notes.divergences
    assert (divergence.position, divergence.in_generation, divergence.parent_call_id) == (1, False, None)


def test_recorded_thoughts_that_the_history_drops_differ_at_the_first_generated_token() -> None:
    output = prefix_merging(recorded("chain-reasoning"))
    places = [(one.turn, one.position, one.closest_turn, one.in_generation) for one in output.notes.divergences]
    assert places == [(2, 35, 1, True), (3, 64, 2, True)]


@pytest.mark.parametrize("chain", ["chain-clean", "chain-clean-text"])
def test_a_recorded_append_only_rollout_is_one_chain(chain: str) -> None:
    entries = recorded(chain)
    output = prefix_merging(reversed(entries))
    assert [ids(chain) for chain in output.chains] == [[entry.model_call_id for entry in entries]]
    assert (output.notes.roots, output.notes.delivered_fraction, output.notes.divergences) == (1, 1.0, [])


def test_the_recorded_retry_that_was_continued_is_kept() -> None:
    output = prefix_merging(recorded("chain-retry"))
    (chain,) = output.chains
    assert ids(chain) == ["01-turn1", "03-turn2-again", "04-turn3", "05-turn4", "06-turn5"]
    assert output.quarantined == ["02-turn2"]
    assert (output.notes.unresolved_retries, output.notes.divergences) == ([], [])


def test_a_retried_first_call_whose_second_answer_is_continued_is_one_root() -> None:
    output = prefix_merging([call("a", [1], [2]), call("b", [1], [3]), call("c", [1, 3, 4], [5])])
    assert [ids(chain) for chain in output.chains] == [["b", "c"]]
    assert (output.notes.roots, output.quarantined, output.notes.unresolved_retries) == (1, ["a"], [])


def test_copies_of_one_call_are_one_call() -> None:
    output = prefix_merging([call("b", [1], [2]), call("a", [1], [2], [-7.0]), call("c", [1, 2, 3], [4])])
    assert [ids(chain) for chain in output.chains] == [["a", "c"]]
    assert (output.notes.copied_calls, output.quarantined, output.notes.generated_tokens_captured) == (["b"], [], 2)


def test_a_retry_of_the_last_call_is_unresolved_and_names_all_answers() -> None:
    output = prefix_merging([call("a", [1], [2]), call("c", [1, 2, 3], [5]), call("b", [1, 2, 3], [4])])
    assert output.notes.unresolved_retries == ["b", "c"]
    assert [ids(chain) for chain in output.chains] == [["a", "b"]]
    assert output.quarantined == ["c"]


def test_two_answers_that_are_both_continued_are_two_chains() -> None:
    output = prefix_merging(
        [
            call("a", [1], [2]),
            call("b", [1], [3]),
            call("d", [1], [4]),
            call("e", [1, 2, 5], [6]),
            call("f", [1, 3, 5], [6]),
        ]
    )
    assert [ids(chain) for chain in output.chains] == [["a", "e"], ["b", "f"]]
    assert (output.notes.roots, output.quarantined, output.notes.unresolved_retries) == (1, ["d"], [])


def test_the_longest_of_nested_answers_is_the_parent() -> None:
    output = prefix_merging([call("a", [1], [2]), call("b", [1], [2, 3]), call("c", [1, 2, 3, 4], [5])])
    assert [ids(chain) for chain in output.chains] == [["b", "c"]]
    assert output.quarantined == ["a"]


def test_an_answer_that_was_resumed_after_a_cut_counts_each_token_once() -> None:
    output = prefix_merging([call("a", [1], [2, 3]), call("b", [1, 2, 3], [4, 5]), call("c", [1, 2, 3, 4, 5, 6], [7])])
    assert project_main_chain_trajectory(output).loss_mask == [0, 1, 1, 1, 1, 0, 1]


def test_empty_generations_are_listed_and_never_linked() -> None:
    output = prefix_merging([call("b", [1], []), call("a", [1, 2], [3]), call("c", [1], [])])
    assert output.notes.empty_generation_calls == ["b", "c"]
    assert [ids(chain) for chain in output.chains] == [["a"]]
    assert output.notes.roots == 1


def test_a_rollout_of_empty_generations_has_no_chain() -> None:
    output = prefix_merging([call("a", [1], [])])
    assert (output.chains, output.notes.roots, output.notes.delivered_fraction) == ([], 0, 0.0)
    with pytest.raises(InvalidEntryError, match="no call has generated tokens"):
        project_main_chain_trajectory(output)


def test_of_several_chains_the_one_whose_root_is_the_earliest_is_the_main_one() -> None:
    output = prefix_merging([call("a", [1], [2], created_at=9.0), call("b", [3, 4], [5], created_at=1.0)])
    assert [(chain.chain_id, ids(chain)) for chain in output.chains] == [("main", ["b"]), ("branch-1", ["a"])]
    assert output.notes.delivered_fraction == 0.5


def test_aborted_calls_count_only_where_they_would_be_delivered() -> None:
    entries = [call("a", [1], [2], finish_reason="abort"), call("b", [1], [3]), call("c", [1, 3, 4], [5])]
    assert prefix_merging(entries).notes.aborted_calls == []
    assert prefix_merging([*entries[:1], call("d", [1, 2, 4], [5])]).notes.aborted_calls == ["a"]


def test_a_call_that_arrives_twice_is_one_call_and_with_other_tokens_an_error() -> None:
    entry = call("a", [1], [2])
    assert [ids(chain) for chain in prefix_merging([entry, call("a", [1], [2])]).chains] == [["a"]]
    with pytest.raises(ConflictingEntryError, match="'a' of rollout 'r'"):
        prefix_merging([entry, call("a", [1], [3])])


def test_a_prompt_that_ends_inside_an_earlier_sequence_departs_at_its_own_end() -> None:
    output = prefix_merging([call("a", [], [1, 2, 3]), call("b", [1, 2], [9])])
    (divergence,) = output.notes.divergences
    assert (divergence.position, divergence.expected_token_id, divergence.found_token_id) == (2, 3, None)
    assert str(divergence).endswith("token 3 there, the prompt ends")


def test_a_branch_right_after_its_parent_names_the_sibling() -> None:
    output = prefix_merging([call("a", [1], [2]), call("b", [1, 2, 3], [4]), call("c", [1, 2, 5, 6], [7])])
    (divergence,) = output.notes.divergences
    assert (divergence.parent_call_id, divergence.closest_call_id, divergence.position) == ("a", "b", 2)
    assert not divergence.in_generation


def test_a_chain_may_be_deeper_than_the_recursion_limit() -> None:
    entries = append_only(3000, context=1, generated=1)
    sibling = call("z", [*entries[-1].prompt_token_ids, 7], [1])
    output = prefix_merging([*entries, sibling])
    assert max(len(chain.links) for chain in output.chains) == 3000
    assert len(project_chain_trajectory(output.chains[0]).token_ids) >= 6000


def function_calls(work: Callable[[], object]) -> int:
    """How many functions are called, in Python and in C: a measure of work that no busy machine disturbs."""
    count = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def with_a_compaction(turns: int) -> list[TokenEntry]:
    """An append-only rollout with one prompt at its end that needs the tree of everything before it."""
    entries = append_only(turns)
    return [*entries, call("z", [9, *entries[-1].prompt_token_ids], [1])]


def drifting(turns: int) -> list[TokenEntry]:
    """A harness that drops each turn's thought: every prompt departs from the one before at its end."""
    entries: list[TokenEntry] = []
    history = list(range(100, 110))
    for turn in range(turns):
        entries.append(call(f"c{turn:05}", history, [7, 8, turn]))
        history = [*history, 8, turn]
    return entries


def agents_with_one_system_prompt(agents: int) -> list[TokenEntry]:
    system = list(range(1000))
    return [call(f"c{agent:05}", [*system, agent, *[5] * (agent % 7)], [1, 2]) for agent in range(agents)]


@pytest.mark.parametrize("grow", [append_only, with_a_compaction, drifting, agents_with_one_system_prompt])
def test_four_times_the_calls_take_about_four_times_the_work(grow: Callable[[int], list[TokenEntry]]) -> None:
    few, many = grow(500), grow(2000)
    # Quadratic work would be 16 times as much.
    assert function_calls(lambda: prefix_merging(many)) < 5 * function_calls(lambda: prefix_merging(few))


def test_the_flat_trajectory_takes_work_in_proportion_to_the_calls() -> None:
    few, many = prefix_merging(append_only(500)), prefix_merging(append_only(2000))
    work = function_calls(lambda: project_main_chain_trajectory(many))
    assert work < 5 * function_calls(lambda: project_main_chain_trajectory(few))


@pytest.mark.alone
def test_a_hundred_calls_of_a_hundred_thousand_tokens_take_milliseconds() -> None:
    entries = append_only(100, context=600, generated=400)
    times = []
    for _ in range(5):
        start = time.process_time()
        trajectory = project_main_chain_trajectory(prefix_merging(entries))
        times.append(time.process_time() - start)
    assert len(trajectory.token_ids) == 99_405
    # About 3 ms on two slow cores; the bound tells only whether tokens were touched one by one.
    assert min(times) < 0.03


def test_what_was_captured_is_freed_with_its_last_user() -> None:
    gc.disable()
    try:
        entries = append_only(3)
        first = weakref.ref(entries[0])
        trajectory = project_main_chain_trajectory(prefix_merging(entries))
        del entries
        assert first() is None
    finally:
        gc.enable()
    assert len(trajectory.token_ids) > 0
