"""Exact token ids and log probabilities of agent rollouts, captured durably and rebuilt for training.

A model server records each call with ``capture_tokens``; ``TokenCaptureStore`` keeps the records in
one SQLite file; ``trajectories_from_source`` rebuilds a finished rollout. What delivers a rollout to
a trainer is in ``token_id_capture.delivery``, which is not imported here.

Importing this package loads the standard library alone: each name brings what it needs on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from token_id_capture.builder import (
        BuildNotes,
        BuildOutput,
        Chain,
        ChainLink,
        Trajectory,
        assert_prefix_contiguity,
        per_request,
        prefix_merging,
        project_chain_to_output_items,
        project_chain_trajectory,
        project_main_chain_response,
        project_main_chain_trajectory,
        run_builder,
    )
    from token_id_capture.config import TokenIdCaptureConfig, TokenIdCaptureSettings
    from token_id_capture.consumer import (
        clear_token_captures_for_rollouts,
        token_id_capture_dirs_from_config,
        trajectories_for_rollout,
        trajectories_from_source,
    )
    from token_id_capture.errors import (
        ConfigurationError,
        ConflictingEntryError,
        CorruptCaptureError,
        HandOffError,
        InvalidEntryError,
        NewerSchemaError,
        RolloutFrozenError,
        RolloutRetiredError,
        StatementError,
        StorageFullError,
        StoreClosedError,
        StoreError,
        TokenCaptureError,
        UnknownRolloutError,
        UnsupportedFileSystemError,
        UnusableDatabaseError,
    )
    from token_id_capture.hand_off import HandOffClient
    from token_id_capture.protocols import (
        CallIntents,
        OutcomeRecorder,
        TokenCaptureSnapshot,
        TokenSink,
        TokenSource,
        install_token_sink,
        install_token_source,
        installed_token_sink,
        installed_token_source,
    )
    from token_id_capture.rebuild import Build, ScoredAnswer, Sequences, SnapshotRef, build_snapshot
    from token_id_capture.records import (
        TOKEN_ENTRY_RECORD_SCHEMA_VERSION,
        TOKEN_FIELDS,
        TokenEntry,
        extract_token_fields,
        response_to_output_items,
        strip_token_fields,
        validate_rollout_id,
    )
    from token_id_capture.sink import (
        CaptureContext,
        capture_tokens,
        commit_entry,
        current_capture_context,
        register_call_intent,
        reset_token_sink,
        set_token_sink,
    )
    from token_id_capture.store import TokenCaptureStore, make_token_store
    from token_id_capture.tokens import LogProbs, TokenIds

__all__ = [  # noqa: RUF022  in the order of sorted(), which needs no explanation
    "Build",
    "BuildNotes",
    "BuildOutput",
    "CallIntents",
    "CaptureContext",
    "Chain",
    "ChainLink",
    "ConfigurationError",
    "ConflictingEntryError",
    "CorruptCaptureError",
    "HandOffClient",
    "HandOffError",
    "InvalidEntryError",
    "LogProbs",
    "NewerSchemaError",
    "OutcomeRecorder",
    "RolloutFrozenError",
    "RolloutRetiredError",
    "ScoredAnswer",
    "Sequences",
    "SnapshotRef",
    "StatementError",
    "StorageFullError",
    "StoreClosedError",
    "StoreError",
    "TOKEN_ENTRY_RECORD_SCHEMA_VERSION",
    "TOKEN_FIELDS",
    "TokenCaptureError",
    "TokenCaptureSnapshot",
    "TokenCaptureStore",
    "TokenEntry",
    "TokenIdCaptureConfig",
    "TokenIdCaptureSettings",
    "TokenIds",
    "TokenSink",
    "TokenSource",
    "Trajectory",
    "UnknownRolloutError",
    "UnsupportedFileSystemError",
    "UnusableDatabaseError",
    "assert_prefix_contiguity",
    "build_snapshot",
    "capture_tokens",
    "clear_token_captures_for_rollouts",
    "commit_entry",
    "current_capture_context",
    "extract_token_fields",
    "install_token_sink",
    "install_token_source",
    "installed_token_sink",
    "installed_token_source",
    "make_token_store",
    "per_request",
    "prefix_merging",
    "project_chain_to_output_items",
    "project_chain_trajectory",
    "project_main_chain_response",
    "project_main_chain_trajectory",
    "register_call_intent",
    "reset_token_sink",
    "response_to_output_items",
    "run_builder",
    "set_token_sink",
    "strip_token_fields",
    "token_id_capture_dirs_from_config",
    "trajectories_for_rollout",
    "trajectories_from_source",
    "validate_rollout_id",
]

# The packages that have these names, each of which imports only those before it.
_PACKAGES: Final = (
    "errors",
    "tokens",
    "records",
    "protocols",
    "config",
    "builder",
    "rebuild",
    "sink",
    "store",
    "consumer",
    "hand_off",
)

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        for package in _PACKAGES if name in __all__ else ():
            module = import_module(f"{__name__}.{package}")
            if hasattr(module, name):
                value = globals()[name] = getattr(module, name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
