"""The rows of a build as bytes: JSON lines as ``tokcap finalize`` writes them, Arrow as ``tokcap export`` does."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

from token_id_capture.errors import ConfigurationError
from token_id_capture.export.rows import sequence_rows
from token_id_capture.finalize.row_format import MaskedRows
from token_id_capture.finalize.rows import RolloutLine, trajectory_rows
from token_id_capture.hand_off.body import Body
from token_id_capture.lifecycle import State
from token_id_capture.outputs.arrow import ArrowStream, ArrowTables
from token_id_capture.outputs.columns import TRAJECTORY_COLUMNS
from token_id_capture.rebuild import Build


def write_rows(line: RolloutLine, build: Build, *, masked: MaskedRows, arrow: bool) -> Body:
    """The rows of a build, with the fields of its record; in Arrow without them, and without masked rows.

    Blocks; call it in a thread.

    Raises:
        ConfigurationError: pyarrow is not installed.
        InvalidEntryError: a token id does not fit into an Arrow column.
        OSError: the disk of temporary files is full.
    """
    body = Body()
    try:
        if arrow:
            _write_arrow(body, build)
        else:
            body.write(trajectory_rows(line, build, masked))
    except BaseException:
        body.close()
        raise
    return body


def prepare_arrow() -> None:
    """Load pyarrow, if it is installed, and what it loads on first use; that takes a while, and calls would wait."""
    with suppress(ConfigurationError):
        ArrowTables(TRAJECTORY_COLUMNS).table([])
        ArrowStream(io.BytesIO(), TRAJECTORY_COLUMNS).finish()


def _write_arrow(body: Any, build: Build) -> None:
    stream, ref = ArrowStream(body, TRAJECTORY_COLUMNS), build.snapshot
    rollout = {
        "rollout_id": build.rollout_id,
        "snapshot_id": ref and ref.snapshot_id,
        "version": ref and ref.version,
        "state": State.FROZEN.value,
        "outcome": None,
    }
    for row in sequence_rows(rollout, build):
        stream.write(row)
    stream.finish()
