"""Tests of NeMo Gym that cannot hold with this store in place, and why."""

from __future__ import annotations

from typing import Final

FILES: Final = "it reads or writes the files of Gym's own store by name; this store has one database"
CACHE: Final = "it looks into the cache of Gym's file resolver; this resolver keeps none"
LEDGER: Final = "external staging, whose tokens never reach a sink, is refused by this package"
AT_THE_DOOR: Final = (
    "it stores a malformed record and expects its reader to fail; here put refuses it and nothing is stored"
)

REASONS: Final = {
    "test_token_capture_ledger.py": LEDGER,
    "test_token_id_capture.py::test_token_store_append_uses_the_compact_entry_index": FILES,
    "test_token_id_capture.py::test_token_store_recovers_an_unindexed_durable_tail": FILES,
    "test_token_id_capture.py::test_token_store_freeze_is_atomic_and_conditional_drop_is_race_safe": FILES,
    "test_token_id_capture.py::test_token_store_sweeps_only_old_retired_tombstones": FILES,
    "test_token_id_capture.py::test_token_store_recovers_state_lag_from_the_durable_jsonl_tail": FILES,
    "test_token_id_capture.py::test_delete_removes_records_and_marker": FILES,
    "test_token_id_capture.py::test_file_lineage_batch_loads_and_flattens_a_delta_chain": CACHE,
    "test_token_id_capture.py::test_file_lineage_reuses_the_latest_materialized_parent": CACHE,
    "test_token_id_capture.py::test_file_lineage_cache_is_lru_and_keeps_nodes_metadata_only": CACHE,
    "test_token_id_capture.py::test_file_lineage_materialized_cache_has_a_global_token_bound": CACHE,
    "test_token_id_capture.py::test_file_lineage_uses_bounded_striped_locks": CACHE,
    "test_token_id_capture.py::test_file_lineage_appends_without_rewriting_prior_records": FILES,
    "test_token_id_capture.py::test_file_lineage_resolves_across_spawned_worker_processes": (
        "its child processes import Gym's resolver anew, which looks for files"
    ),
    "test_token_id_capture.py::test_retirement_invalidates_warm_worker_indexes": FILES,
    "test_token_id_capture.py::test_an_unsafe_rollout_id_is_rejected": FILES,
    "test_token_id_capture.py::test_a_newer_record_in_the_store_fails_the_read_rather_than_being_skipped": FILES,
    "test_rollout_collection.py::TestFinalizeRolloutTokenCapture::"
    "test_a_failed_build_keeps_its_records_and_reports_why": AT_THE_DOOR,
    "test_trajectory_builder.py::test_malformed_capture_masks_the_rollout_instead_of_raising": AT_THE_DOOR,
    "test_trajectory_builder.py::test_broken_delta_chain_masks_instead_of_guessing": AT_THE_DOOR,
}
"""By the beginning of the test's id, from its file's name on."""


def why_not(test: str) -> str | None:
    """The reason why this test cannot hold; None if it must."""
    return next((reason for start, reason in REASONS.items() if test.startswith(start)), None)
