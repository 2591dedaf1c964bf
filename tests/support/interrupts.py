"""The state of SIGINT in this process, which every child inherits."""

from __future__ import annotations

import signal


def listen_to_interrupts() -> None:
    """Take SIGINT as a program in the foreground does.

    A shell starts what it puts into the background with SIGINT ignored (``scripts/test &`` in a script, or
    ``nohup``), an ignored signal stays ignored across ``exec``, and a child that a test interrupts would
    never end.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
