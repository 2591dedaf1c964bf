"""Python's garbage collector, in processes of this package that make many objects and few cycles of them."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """Run the collector after 10,000 new objects, not 700, and never over what is loaded by now.

    A process that serves would stop for tens of milliseconds each time that it walked all modules; one that builds
    rollouts, whose calls form no cycles, would spend a tenth of its time on it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
