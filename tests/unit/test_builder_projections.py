"""Chains as responses, sequences and records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.call_trees import call
from token_id_capture.builder import (
    Chain,
    ChainLink,
    assert_prefix_contiguity,
    per_request,
    prefix_merging,
    project_chain_to_output_items,
    project_chain_trajectory,
    project_main_chain_response,
    run_builder,
)
from token_id_capture.errors import ConfigurationError, InvalidEntryError
from token_id_capture.records import TokenEntry
from token_id_capture.tokens import TokenIds


def ids(chain: Chain) -> list[str]:
    return [link.entry.model_call_id for link in chain.links]


def test_per_request_makes_one_sequence_a_call_and_no_response() -> None:
    output = run_builder([call("b", [1, 2, 3], [4]), call("a", [1], [2]), call("c", [1], [])], "per_request")
    assert [ids(chain) for chain in output.chains] == [["a"], ["b"]]
    assert (output.notes.builder, output.notes.empty_generation_calls) == ("per_request", ["c"])
    assert [project_chain_trajectory(chain).loss_mask for chain in output.chains] == [[0, 1], [0, 0, 0, 1]]
    with pytest.raises(InvalidEntryError, match="one sequence a call"):
        project_main_chain_response("r", output)
    assert per_request([]).notes.delivered_fraction == 0.0


def test_an_unknown_builder_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="unknown builder 'newest': use one of per_request, prefix_merging"):
        run_builder([], "newest")


def test_the_response_carries_tokens_on_the_item_that_carried_them() -> None:
    content = [
        {"type": "reasoning", "summary": [], "generation_token_ids": [1]},
        {"type": "function_call", "name": "ls", "arguments": '{"b":1, "a":2}'},
        {"type": "message", "role": "assistant", "content": "done"},
    ]
    first = call("a", [1, 2], [3], [-0.5], output_items=content, token_item_index=1, routed_experts="AAE=", model="m")
    response = project_main_chain_response("r", prefix_merging([first, call("b", [1, 2, 3, 4], [5], [-0.6])]))
    assert response["output"] == [
        {"type": "reasoning", "summary": []},
        {
            "type": "function_call",
            "name": "ls",
            "arguments": '{"b":1, "a":2}',
            "prompt_token_ids": [1, 2],
            "generation_token_ids": [3],
            "generation_log_probs": [-0.5],
            "routed_experts": "AAE=",
        },
        {"type": "message", "role": "assistant", "content": "done"},
        {
            "type": "message",
            "role": "assistant",
            "content": [],
            "prompt_token_ids": [1, 2, 3, 4],
            "generation_token_ids": [5],
            "generation_log_probs": [-0.6],
        },
    ]
    assert (response["id"], response["object"], response["model"]) == ("rebuilt-r", "response", "")
    assert response["usage"] == {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    assert "prompt_token_ids" not in first.output_items[1], "the entry itself is untouched"
    json.dumps(response)


def test_the_response_names_the_model_that_was_asked_for_or_recorded() -> None:
    output = prefix_merging([call("a", [1], [2], model="recorded")])
    assert project_main_chain_response("r", output)["model"] == "recorded"
    assert project_main_chain_response("r", output, model="wanted")["model"] == "wanted"


def test_without_an_index_the_last_item_carries_the_tokens() -> None:
    items = [{"type": "message", "content": "x"}, {"type": "message", "content": "y"}]
    output = prefix_merging([call("a", [1], [2], output_items=items)])
    carriers = ["generation_token_ids" in item for item in project_chain_to_output_items(output.chains[0])]
    assert carriers == [False, True]


def test_a_chain_that_is_not_contiguous_is_never_projected() -> None:
    first, second = call("a", [1], [2, 3]), call("b", [1, 2, 9, 4], [5])
    chain = Chain("main", [ChainLink(first, TokenIds()), ChainLink(second, TokenIds([4]))], TokenIds([1]))
    for project in (Chain.validate, project_chain_trajectory, project_chain_to_output_items):
        with pytest.raises(InvalidEntryError, match="call 'b' does not continue its chain: they differ at position 2"):
            project(chain)


def test_a_chain_with_tokens_that_nobody_accounts_for_is_refused() -> None:
    chain = Chain("main", [ChainLink(call("a", [1, 2], [3]), TokenIds())], TokenIds([1]))
    with pytest.raises(InvalidEntryError, match="the prompt of call 'a' has 2 tokens; its chain has 1"):
        chain.validate()


def test_a_chain_needs_a_log_probability_for_each_sampled_token() -> None:
    broken = TokenEntry.model_construct(**{**dict(call("a", [1], [2, 3])), "generation_log_probs": [-0.1]})
    with pytest.raises(InvalidEntryError, match="call 'a' has 2 generated tokens and 1 log probabilities"):
        Chain("main", [ChainLink(broken, TokenIds())], TokenIds([1])).validate()


def test_a_chain_without_links_is_all_context() -> None:
    chain = Chain("main", [], TokenIds([1, 2]))
    assert project_chain_to_output_items(chain) == []
    trajectory = project_chain_trajectory(chain)
    assert (trajectory.token_ids, trajectory.loss_mask, trajectory.log_probs) == ([1, 2], [0, 0], [0.0, 0.0])


def token_item(prompt: list[int], generation: list[int], log_probs: list[float]) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "generation_token_ids": generation, "generation_log_probs": log_probs}


def test_a_response_that_is_not_contiguous_is_found_by_item_and_position() -> None:
    items = [token_item([1], [2, 3], [-0.1, -0.2]), {"type": "message"}]
    assert_prefix_contiguity({"output": [*items, token_item([1, 2, 3, 4], [5], [-0.1])]})
    with pytest.raises(AssertionError, match=r"output item 2 .* differs at position 2 from their 3 tokens"):
        assert_prefix_contiguity({"output": [*items, token_item([1, 2, 9], [5], [-0.1])]})
    with pytest.raises(AssertionError, match=r"output item 2 .* prompt of 1 tokens differs at position 1"):
        assert_prefix_contiguity({"output": [*items, token_item([1], [5], [-0.1])]})
    with pytest.raises(AssertionError, match="output item 0 has 1 generated tokens and 2 log probabilities"):
        assert_prefix_contiguity({"output": [token_item([1], [2], [-0.1, -0.2])]})
    assert_prefix_contiguity({})
