"""From a frozen rollout to a build: what is delivered, what is masked, and what is said about it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from support.call_trees import append_only, call, call_trees
from token_id_capture import reasons
from token_id_capture.builder import Trajectory, assert_prefix_contiguity
from token_id_capture.consumer import (
    clear_token_captures_for_rollouts,
    record_outcome,
    token_id_capture_dirs_from_config,
    trajectories_for_rollout,
    trajectories_from_source,
)
from token_id_capture.protocols import TokenCaptureSnapshot
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore

TWO_TURNS = [call("a", [1, 2], [3, 4], [-0.3, -0.4]), call("b", [1, 2, 3, 4, 9], [5], [-0.5])]
METRICS = {
    "n_calls",
    "chains",
    "roots",
    "quarantined_calls",
    "quarantined_fraction",
    "delivered_fraction",
    "generated_tokens_captured",
    "generated_tokens_delivered",
    "empty_generation_calls",
    "capture_incomplete",
}


class FixedSource:
    """A source that has one snapshot and records nothing."""

    def __init__(self, entries: Any, incomplete: bool = False) -> None:
        self.snapshot = TokenCaptureSnapshot("r", tuple(entries), incomplete, "s", 3)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        return self.snapshot

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        raise AssertionError("a build deletes nothing")

    async def close(self) -> None: ...


class BrokenSource(FixedSource):
    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        raise OSError("the volume is gone")


class ForgetfulSource(FixedSource):
    """It wants to record outcomes and cannot."""

    async def record_outcome(self, *outcome: Any) -> None:
        raise OSError("the volume is gone")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[TokenCaptureStore]:
    async with TokenCaptureStore(tmp_path) as store:
        yield store


async def filled(store: TokenCaptureStore, entries: list[TokenEntry]) -> TokenCaptureStore:
    for entry in entries:
        await store.put(entry)
    return store


async def build(entries: Any, **options: Any) -> dict[str, Any]:
    return await trajectories_from_source("r", FixedSource(entries), **options)


async def test_an_append_only_rollout_is_delivered_as_a_response(store: TokenCaptureStore) -> None:
    built = await trajectories_from_source("r", await filled(store, TWO_TURNS), model="policy")
    assert (built["mask_sample"], built["outcome"], built["reason"], built["reasons"]) == (False, "deliverable", "", [])
    assert "error" not in built
    response = built["rebuilt_response"]
    assert_prefix_contiguity(response)
    assert (response["model"], len(response["output"]), built["trajectory"]) == ("policy", 2, None)
    snapshot = await store.freeze("r")
    assert built["_capture_snapshot"] == {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
    assert set(built["metrics"]) >= METRICS
    assert built["metrics"]["n_calls"] == 2
    assert built["metrics"]["delivered_fraction"] == 1.0
    assert built["metrics"]["generated_tokens_delivered"] == built["metrics"]["generated_tokens_captured"] == 3
    assert (built["rollout_id"], built["builder"], built["unresolved_retries"]) == ("r", "prefix_merging", [])
    json.dumps(built)


async def test_the_flat_trajectory_needs_no_response() -> None:
    built = await build(TWO_TURNS, projection="trajectory")
    assert built["rebuilt_response"] is None
    trajectory = built["trajectory"]
    assert isinstance(trajectory, Trajectory)
    assert trajectory.token_ids == [1, 2, 3, 4, 9, 5]
    assert trajectory.loss_mask == [0, 0, 1, 1, 0, 1]
    assert trajectory.log_probs == [0.0, 0.0, -0.3, -0.4, 0.0, -0.5]
    both = await build(TWO_TURNS, projection="both")
    assert both["trajectory"] == trajectory
    assert both["rebuilt_response"]["output"][1]["prompt_token_ids"] == [1, 2, 3, 4, 9]


async def test_an_incomplete_capture_is_masked_with_the_reason_and_every_other_one(store: TokenCaptureStore) -> None:
    await filled(store, [*TWO_TURNS, call("c", [7], [8])])
    await store.begin_call("r", "lost")
    built = await trajectories_from_source("r", store)
    assert (built["mask_sample"], built["outcome"], built["reason"]) == (True, "masked", "capture_incomplete")
    assert [reasons.split_reason(text)[0] for text in built["reasons"]] == ["capture_incomplete", "multiple_roots"]
    assert built["error"] == "capture_incomplete: " + reasons.BUILD_REASONS["capture_incomplete"]
    assert built["metrics"]["capture_incomplete"] is True
    assert built["metrics"]["error"] == built["error"]
    assert (built["rebuilt_response"], built["trajectory"]) == (None, None)


async def test_a_second_root_is_masked_and_its_divergence_told() -> None:
    built = await build([call("a", [1, 2], [53122, 316]), call("b", [1, 2, 393, 30002, 9], [7])])
    assert built["reason"] == "multiple_roots"
    assert built["reasons"] == [
        "multiple_roots: 2 roots; turn 2 (call b) departs from turn 1 (call a) at position 2 of 4, "
        "in its generation: token 53122 there, the prompt has 393"
    ]
    (divergence,) = built["divergences"]
    assert (divergence["turn"], divergence["position"], divergence["closest_call_id"]) == (2, 2, "a")
    assert built["metrics"]["divergent_prompts"] == 1
    json.dumps(built)


async def test_a_fork_is_masked_as_several_sequences() -> None:
    fork = [call("a", [1], [2]), call("b", [1, 2, 3], [4]), call("c", [1, 2, 3, 5, 6], [7])]
    built = await build(fork)
    assert (built["reason"], built["metrics"]["chains"], built["metrics"]["roots"]) == ("multiple_chains", 2, 1)
    assert "2 sequences; turn 3 (call c) departs from turn 2 (call b) at position 3 of 4" in built["reasons"][0]


async def test_a_retry_of_the_last_call_is_masked_and_names_both_answers() -> None:
    built = await build([call("a", [1], [2]), call("c", [1, 2, 3], [5]), call("b", [1, 2, 3], [4])])
    assert (built["reason"], built["unresolved_retries"]) == ("unresolved_retry", ["b", "c"])
    assert built["reasons"] == ["unresolved_retry: b, c"]
    assert built["error"].endswith("(b, c)")
    assert (built["metrics"]["quarantined_calls"], built["metrics"]["quarantined_fraction"]) == (1, 0.3333)


async def test_a_greedy_retry_in_the_middle_is_delivered() -> None:
    built = await build([*TWO_TURNS, call("a2", [1, 2], [3, 4])])
    assert (built["mask_sample"], built["metrics"]["copied_calls"]) == (False, 1)


async def test_a_retried_first_call_whose_second_answer_is_continued_is_delivered() -> None:
    built = await build([*TWO_TURNS, call("0", [1, 2], [7])])
    assert (built["mask_sample"], built["metrics"]["roots"], built["metrics"]["quarantined_calls"]) == (False, 1, 1)


async def test_a_rollout_of_empty_generations_is_masked_and_names_the_calls() -> None:
    built = await build([call(f"c{n:02}", [1], []) for n in range(10)])
    assert built["reasons"] == ["empty_generations: c00, c01, c02, c03, c04, c05, c06, c07 and 2 more"]
    assert built["metrics"]["empty_generation_calls"] == 10


async def test_an_empty_generation_among_others_is_only_counted() -> None:
    built = await build([*TWO_TURNS, call("c", [1, 2, 3, 4, 9], [])])
    assert (built["mask_sample"], built["metrics"]["empty_generation_calls"]) == (False, 1)


async def test_an_aborted_call_masks_where_it_would_be_delivered() -> None:
    aborted = call("b", [1, 2, 3, 4, 9], [5], finish_reason="abort")
    built = await build([TWO_TURNS[0], aborted])
    assert (built["outcome"], built["reasons"]) == ("masked", ["aborted_call: b"])
    dropped = call("0", [1, 2], [7], finish_reason="abort")
    assert (await build([*TWO_TURNS, dropped]))["mask_sample"] is False


async def test_a_rollout_that_nobody_recorded_is_masked(store: TokenCaptureStore) -> None:
    built = await trajectories_from_source("r", store)
    assert (built["outcome"], built["reason"], built["metrics"]["n_calls"]) == ("masked", "nothing_recorded", 0)


async def test_a_freeze_that_fails_is_a_failed_build_without_a_snapshot() -> None:
    built = await trajectories_from_source("r", BrokenSource(()))
    assert (built["outcome"], built["reasons"]) == ("failed", ["freeze_failed: the volume is gone"])
    assert "_capture_snapshot" not in built
    assert set(built["metrics"]) >= METRICS


async def test_a_malformed_rollout_id_is_a_failed_build() -> None:
    built = await trajectories_from_source("../etc", FixedSource(TWO_TURNS))
    assert (built["outcome"], built["reason"]) == ("failed", "invalid_rollout_id")


@pytest.mark.parametrize(
    ("entries", "options", "message"),
    [
        ([call("a", [1], [2]), call("a", [1], [3])], {}, "reused with a different payload"),
        ([call("a", [1], [2], rollout_id="other")], {}, "calls of other rollouts: other"),
        (TWO_TURNS, {"builder": "newest"}, "unknown builder 'newest'"),
        (TWO_TURNS, {"builder": "per_request"}, "one sequence a call, for export"),
        (TWO_TURNS[:1], {"builder": "per_request"}, "one sequence a call, for export"),
        (TWO_TURNS, {"projection": "text"}, "unknown projection 'text'"),
        ([None], {}, "NoneType"),
    ],
)
async def test_what_cannot_be_built_is_a_failed_build(
    entries: list[TokenEntry], options: dict[str, Any], message: str
) -> None:
    built = await build(entries, **options)
    assert (built["mask_sample"], built["outcome"], built["reason"]) == (True, "failed", "build_failed")
    assert message in built["reasons"][0]
    assert message in built["error"]
    assert built["_capture_snapshot"] == {"snapshot_id": "s", "version": 3}
    assert built["metrics"]["n_calls"] == len(entries)


async def test_a_failed_build_of_an_incomplete_capture_says_both() -> None:
    source = FixedSource([call("a", [1], [2]), call("a", [1], [3])], incomplete=True)
    built = await trajectories_from_source("r", source)
    assert [reasons.split_reason(text)[0] for text in built["reasons"]] == ["build_failed", "capture_incomplete"]


async def test_a_call_with_too_few_log_probabilities_is_never_delivered() -> None:
    broken = TokenEntry.model_construct(
        **{**dict(TWO_TURNS[0]), "generation_log_probs": TWO_TURNS[1].generation_log_probs}
    )
    built = await build([broken])
    assert built["reasons"] == ["build_failed: call 'a' has 2 generated tokens and 1 log probabilities"]


async def test_masked_and_failed_outcomes_are_recorded_with_their_reason(store: TokenCaptureStore) -> None:
    await filled(store, [call("a", [1], [2]), call("b", [1], [3])])
    await trajectories_from_source("r", store)
    await trajectories_from_source("r", store)
    await trajectories_from_source("r", store, builder="newest")
    outcomes = (await store.describe_rollout("r")).outcomes
    assert [(one.outcome, one.reason) for one in outcomes] == [
        ("masked", "unresolved_retry"),
        ("failed", "build_failed"),
    ]


async def test_a_deliverable_build_is_not_recorded_before_it_is_handed_on(store: TokenCaptureStore) -> None:
    await trajectories_from_source("r", await filled(store, TWO_TURNS))
    assert (await store.describe_rollout("r")).outcomes == ()


async def test_a_outcome_that_cannot_be_recorded_is_logged_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    built = await trajectories_from_source("r", ForgetfulSource(()))
    assert built["reason"] == "nothing_recorded"
    assert "outcome 'masked' of snapshot s was not recorded: the volume is gone" in caplog.text
    assert await record_outcome(FixedSource(()), built, "masked") is False


async def test_the_event_loop_is_not_the_one_that_builds() -> None:
    threads: list[int] = []

    class Watched(tuple[TokenEntry, ...]):
        def __iter__(self) -> Iterator[TokenEntry]:
            threads.append(threading.get_ident())
            return super().__iter__()

    source = FixedSource(())
    source.snapshot = TokenCaptureSnapshot("r", Watched(TWO_TURNS), False, "s", 1)
    assert (await trajectories_from_source("r", source))["mask_sample"] is False
    assert threads
    assert threading.get_ident() not in threads


async def test_many_divergences_are_counted_and_only_the_first_are_listed() -> None:
    built = await build([call(f"c{n:02}", [n], [1]) for n in range(40)])
    assert (built["metrics"]["divergent_prompts"], len(built["divergences"])) == (39, 16)


@settings(max_examples=60)
@given(call_trees())
def test_no_rollout_makes_it_raise_and_only_one_whole_sequence_is_unmasked(entries: list[TokenEntry]) -> None:
    built = asyncio.run(build(entries, projection="both"))
    if built["mask_sample"]:
        assert built["reason"] in reasons.BUILD_REASONS
        assert (built["rebuilt_response"], built["trajectory"]) == (None, None)
    else:
        assert (built["metrics"]["roots"], built["metrics"]["chains"], built["reasons"]) == (1, 1, [])
        assert sum(built["trajectory"].loss_mask) == built["metrics"]["generated_tokens_delivered"] > 0
        assert_prefix_contiguity(built["rebuilt_response"])


# The local directories


async def captured(directory: Path, entries: list[TokenEntry]) -> None:
    async with TokenCaptureStore(directory) as store:
        await filled(store, entries)


def test_a_rollout_is_built_from_its_directory(tmp_path: Path) -> None:
    asyncio.run(captured(tmp_path, TWO_TURNS))
    built = trajectories_for_rollout("r", [tmp_path], model="policy")
    assert built is not None
    assert (built["mask_sample"], built["rebuilt_response"]["model"]) == (False, "policy")


async def test_a_rollout_is_built_also_while_an_event_loop_runs(tmp_path: Path) -> None:
    await captured(tmp_path, TWO_TURNS)
    built = trajectories_for_rollout("r", [str(tmp_path)], projection="trajectory")
    assert built is not None
    assert len(built["trajectory"].token_ids) == 6


def test_the_directory_that_knows_the_rollout_is_used(tmp_path: Path) -> None:
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    asyncio.run(captured(second, [call("x", [1], [2], rollout_id="other")]))
    asyncio.run(captured(third, append_only(3)))
    built = trajectories_for_rollout("r", [first, second, third])
    assert built is not None
    assert built["metrics"]["n_calls"] == 3
    assert not first.exists()


def test_without_a_directory_there_is_no_build_and_without_a_database_a_failed_one(tmp_path: Path) -> None:
    assert trajectories_for_rollout("r", []) is None
    built = trajectories_for_rollout("r", [tmp_path])
    assert built is not None
    assert (built["mask_sample"], built["reason"]) == (True, "freeze_failed")
    assert list(tmp_path.iterdir()) == []


async def test_clearing_removes_exactly_the_rollouts_that_are_about_to_run(tmp_path: Path) -> None:
    names = ["0-0", "0-0-a1", "0-1", "mine"]
    await captured(tmp_path, [call("a", [1], [2], rollout_id=name) for name in names])
    records: list[dict[str, Any]] = [
        {"_ng_task_index": 0, "_ng_rollout_index": 0},
        {"_ng_rollout_id": "mine"},
        {"_ng_task_index": 5, "_ng_rollout_index": 5},
        {"reward": 1.0},
    ]
    clear_token_captures_for_rollouts(records, [tmp_path, tmp_path / "empty"])
    async with TokenCaptureStore(tmp_path) as store:
        assert [one.rollout_id for one in await store.list_rollouts()] == ["0-0-a1", "0-1"]
        await store.put(call("b", [1], [3], rollout_id="0-0"))
        assert [one.model_call_id for one in await store.read_entries("0-0")] == ["b"]


def test_clearing_refuses_the_whole_batch_for_one_malformed_id(tmp_path: Path) -> None:
    asyncio.run(captured(tmp_path, TWO_TURNS))
    with pytest.raises(ValueError, match="invalid rollout id"):
        clear_token_captures_for_rollouts([{"_ng_rollout_id": "r"}, {"_ng_rollout_id": "a/b"}], [tmp_path])
    built = trajectories_for_rollout("r", [tmp_path])
    assert built is not None
    assert built["mask_sample"] is False
    clear_token_captures_for_rollouts([{"_ng_rollout_id": "a/b"}], [])


def test_the_directory_of_a_configuration_is_the_one_that_can_be_read_back(tmp_path: Path) -> None:
    def directories(**block: Any) -> list[Path]:
        return token_id_capture_dirs_from_config({"token_id_capture": block, "model_call_capture_dir": "/fallback"})

    assert directories(enabled=True, dir=str(tmp_path)) == [tmp_path]
    assert directories(enabled=True) == [Path("/fallback")]
    assert directories(enabled=False, dir=str(tmp_path)) == []
    assert directories(enabled=True, sink="collections:OrderedDict") == []
    assert token_id_capture_dirs_from_config({}) == []
    with pytest.raises(ValueError):
        directories(enabled=True, directory=str(tmp_path))
