"""Finished rollouts over HTTP: what a gateway offers to trainers elsewhere, and the client that takes it.

::

    client                                gateway                              store
    POST rollouts/ID/snapshot  ────────►  freeze                       ──────► snapshot, version
              calls, as stored ◄────────  length and digest in the head
    build, write the row, fsync
    POST outcomes              ────────►  delivered                    ──────► build_outcomes
    POST rollouts/ID/acknowledge ──────►  drop exactly this version    ──────► retired

Every step may be repeated: the answer is the same, and nothing happens twice.
"""

from __future__ import annotations

from token_id_capture.hand_off.client import HandedRows, HandOffClient

__all__ = ["HandOffClient", "HandedRows"]
