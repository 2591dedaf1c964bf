"""Python's collector of reference cycles, in processes of our own."""

import gc


def collect_rarely() -> None:
    """Call it once all is loaded, which the collector then never walks again.

    A call's entry is dozens of objects that live until its rollout is done, so by default the collector walks what is
    needed still: a third of the time of an export.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
