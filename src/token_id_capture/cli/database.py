"""The file that a housekeeping command works on."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def database_file(database: Path) -> Path:
    """The file that ``--database`` means, for a command that works on the file and needs no store."""
    from token_id_capture.store.location import database_path
    from token_id_capture.store.warnings import WalResetBugWarning

    # Said where a server starts and by the doctor; these commands keep to the gate.
    warnings.simplefilter("ignore", WalResetBugWarning)
    return database_path(database)
