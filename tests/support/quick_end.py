"""The end of a forked process, without what an interpreter does last: it takes apart every module.

That would write to each page that the process shares with the one that it was forked from, so it would copy all of
them, which takes longer than a short command itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

_UNFLUSHED = 120
"""The exit code of an interpreter that could not write out what its standard output held."""


@contextlib.contextmanager
def quick_end() -> Iterator[None]:
    """End the process with the block. What ends neither in order nor by ``sys.exit`` ends as ever."""
    code = 0
    try:
        yield
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    _end(code)


def _end(code: int) -> NoReturn:
    """As ``Py_FinalizeEx``: threads, then exit functions, then what is written; garbage may complain before that."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    for stream in (sys.stderr, sys.stdout):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = _UNFLUSHED
    os._exit(code & 0xFF)
