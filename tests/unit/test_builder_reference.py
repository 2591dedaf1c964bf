"""The builder against a slow, obvious one, on random call trees."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from support.call_trees import call_trees, grow, on_one_buffer
from support.reference_builder import Reference, reference_build
from token_id_capture.builder import (
    BuildOutput,
    assert_prefix_contiguity,
    prefix_merging,
    project_chain_trajectory,
    project_main_chain_response,
    project_main_chain_trajectory,
)
from token_id_capture.builder.call_forest import CallForest
from token_id_capture.records import TokenEntry

THOROUGH = settings(max_examples=1000)
BRIEF = settings(max_examples=200)


def say_what_happened(expected: Reference) -> None:
    for name in ("empty", "copies", "quarantined", "unresolved", "divergences"):
        if getattr(expected, name):
            event(name)
    event("one chain" if len(expected.paths) == 1 else "several chains")


def assert_same(output: BuildOutput, expected: Reference) -> None:
    notes = output.notes
    assert [[link.entry.model_call_id for link in chain.links] for chain in output.chains] == expected.paths
    assert output.quarantined == expected.quarantined
    assert notes.empty_generation_calls == expected.empty
    assert notes.copied_calls == expected.copies
    assert notes.unresolved_retries == expected.unresolved
    assert notes.roots == expected.roots
    assert notes.chains == len(expected.paths)
    assert notes.generated_tokens_captured == expected.captured
    assert notes.generated_tokens_delivered == sum(expected.loss_mask)
    assert [
        (one.model_call_id, one.turn, one.closest_call_id, one.closest_turn, one.position, one.in_generation)
        for one in notes.divergences
    ] == expected.divergences


@THOROUGH
@given(call_trees())
def test_the_builder_agrees_with_the_reference(entries: list[TokenEntry]) -> None:
    expected = reference_build(entries)
    say_what_happened(expected)
    output = prefix_merging(entries)
    assert_same(output, expected)
    if output.chains:
        trajectory = project_main_chain_trajectory(output)
        assert trajectory.token_ids == expected.token_ids
        assert trajectory.loss_mask == expected.loss_mask
        assert trajectory.log_probs == expected.log_probs


def test_the_builder_agrees_with_the_reference_on_a_thousand_larger_trees() -> None:
    random = Random(20)
    for _ in range(1000):
        entries = grow(random.randbytes(random.randrange(60, 160)))
        assert_same(prefix_merging(entries), reference_build(entries))


@BRIEF
@given(call_trees())
def test_views_of_one_buffer_build_the_same(entries: list[TokenEntry]) -> None:
    assert_same(prefix_merging(on_one_buffer(entries)), reference_build(entries))


@pytest.mark.parametrize("tries", [0, 1, 2, 3])
@BRIEF
@given(call_trees(max_choices=160))
def test_the_tree_finds_the_same_parents_as_trying_calls_one_by_one(tries: int, entries: list[TokenEntry]) -> None:
    expected = reference_build(entries)
    forest = CallForest(tries)
    for entry in sorted(entries, key=lambda entry: (len(entry.prompt_token_ids), entry.model_call_id)):
        if entry.generation_token_ids:
            forest.add(entry)
    assert {one.call_id: one.parent.call_id if one.parent else None for one in forest.calls} == expected.parents
    assert list(forest.copies) == expected.copies


@BRIEF
@given(call_trees(), st.randoms())
def test_the_order_of_arrival_does_not_matter(entries: list[TokenEntry], random: Random) -> None:
    assert prefix_merging(random.sample(entries, len(entries))) == prefix_merging(entries)


@BRIEF
@given(call_trees())
def test_every_sampled_token_counts_at_most_once(entries: list[TokenEntry]) -> None:
    output = prefix_merging(entries)
    assert output.notes.generated_tokens_delivered <= output.notes.generated_tokens_captured
    for chain in output.chains:
        trajectory = project_chain_trajectory(chain)
        assert len(trajectory.token_ids) == len(trajectory.loss_mask) == len(trajectory.log_probs)
        sampled = [token for token, mask in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mask]
        assert sampled == [token for link in chain.links for token in link.entry.generation_token_ids]
        assert len({link.entry.model_call_id for link in chain.links}) == len(chain.links)
        context = [p for p, mask in zip(trajectory.log_probs, trajectory.loss_mask, strict=True) if not mask]
        assert not any(context)


@BRIEF
@given(call_trees())
def test_both_projections_say_the_same(entries: list[TokenEntry]) -> None:
    output = prefix_merging(entries)
    if not output.chains:
        return
    response = project_main_chain_response("r", output)
    assert_prefix_contiguity(response)
    token_ids: list[int] = []
    loss_mask: list[int] = []
    log_probs: list[float] = []
    for item in response["output"]:
        prompt, generation = item["prompt_token_ids"], item["generation_token_ids"]
        context = len(prompt) - len(token_ids)
        token_ids = prompt + generation
        loss_mask += [0] * context + [1] * len(generation)
        log_probs += [0.0] * context + item["generation_log_probs"]
    trajectory = project_main_chain_trajectory(output)
    assert (trajectory.token_ids, trajectory.loss_mask, trajectory.log_probs) == (token_ids, loss_mask, log_probs)
