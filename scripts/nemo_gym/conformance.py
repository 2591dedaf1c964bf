"""Run NeMo Gym's conformance kit on our endpoints, on a database of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from nemo_gym.token_id_capture.conformance import run_conformance

from token_id_capture.integrations.nemo_gym import CaptureSink, CaptureSource, LineageStore


def main() -> None:
    """Print the names of the checks that passed as JSON; a check that fails ends in its error."""
    with tempfile.TemporaryDirectory() as directory:
        database = Path(directory) / "captures.db"
        passed = asyncio.run(
            run_conformance(
                lambda: CaptureSink(database), lambda: CaptureSource(database), lambda: LineageStore(database)
            )
        )
    json.dump(passed, sys.stdout)
    print()


if __name__ == "__main__":
    main()
