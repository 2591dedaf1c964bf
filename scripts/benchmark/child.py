"""A measured process: ``python -m benchmark.child JOB ARGUMENTS``, the arguments as JSON.

A job is a module of this package with ``async def run(start, **arguments)``. It imports, reads its
inputs and opens what it measures, and then calls ``start``, which tells the parent that it is ready
and waits for its word: so preparing is not measured, and several processes begin together. What
``run`` returns goes to the parent as one line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import warnings
from importlib import import_module
from typing import Any

import uvloop


def start(**facts: Any) -> None:
    """Tell the parent that all is prepared, with what it must know, and wait until it says go."""
    # For every store alike: the collector walks what is made while the clock runs, not modules and inputs.
    gc.collect()
    gc.freeze()
    print(json.dumps(facts), flush=True)
    wait_for_word()


def wait_for_word() -> None:
    """Wait until the parent says something."""
    sys.stdin.readline()


def main() -> None:
    """Run the job that the command line names."""
    warnings.simplefilter("ignore")  # about this machine's SQLite, once in every process
    job = import_module(f"benchmark.{sys.argv[1]}")
    # What serves or asks runs on the loop that the gateway runs on.
    run = uvloop.run if sys.argv[1].startswith("gateway.") else asyncio.run
    print(json.dumps(run(job.run(start, **json.loads(sys.argv[2])))), flush=True)


if __name__ == "__main__":
    main()
