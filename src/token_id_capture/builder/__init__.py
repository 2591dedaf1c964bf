"""Join the captured calls of a frozen rollout to training sequences. Pure: entries in, chains out.

``prefix_merging`` joins a call to the earlier call whose prompt + generation is the longest exact
prefix of its prompt; nothing is guessed, and neither order of arrival nor time matters.
``per_request`` makes one sequence a call. What comes out is in ``chains``, the forms of delivery are in
``projections``, and ``call_forest`` says why building an append-only rollout is linear in its distinct tokens.
"""

from token_id_capture.builder.build import per_request, prefix_merging, run_builder
from token_id_capture.builder.chains import BuildNotes, BuildOutput, Chain, ChainLink, Divergence
from token_id_capture.builder.projections import (
    Trajectory,
    assert_prefix_contiguity,
    project_chain_to_output_items,
    project_chain_trajectory,
    project_main_chain_response,
    project_main_chain_trajectory,
)

__all__ = [
    "BuildNotes",
    "BuildOutput",
    "Chain",
    "ChainLink",
    "Divergence",
    "Trajectory",
    "assert_prefix_contiguity",
    "per_request",
    "prefix_merging",
    "project_chain_to_output_items",
    "project_chain_trajectory",
    "project_main_chain_response",
    "project_main_chain_trajectory",
    "run_builder",
]
