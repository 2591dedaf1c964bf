"""The suite that every sink and source of captured tokens must pass. It needs pytest, and no plugin.

Subclass it in a test module and say how your implementation is opened; pytest collects the rest::

    from token_id_capture.testing.contract import CaptureContract

    class TestMyStore(CaptureContract):
        @asynccontextmanager
        async def open_store(self, directory):
            store = MyStore(directory / "captures")
            yield store, store            # the sink and the source
            await store.close()

A test opens the same directory twice to stand for two processes. Promises of an optional extension
(``CallIntents``, ``OutcomeRecorder``, ``delete``) are skipped where the implementation lacks it.
"""

from __future__ import annotations

from token_id_capture.testing.contract.entries import EntryContract
from token_id_capture.testing.contract.extensions import IntentContract, OutcomeContract, ReuseContract
from token_id_capture.testing.contract.harness import OpenedStore, assert_same_entry, make_entry
from token_id_capture.testing.contract.snapshots import SnapshotContract


class CaptureContract(EntryContract, SnapshotContract, IntentContract, OutcomeContract, ReuseContract):
    """Subclass it, override ``open_store``, and name the subclass ``Test...``."""


__all__ = ["CaptureContract", "OpenedStore", "assert_same_entry", "make_entry"]
