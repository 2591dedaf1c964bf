"""The command ``tokcap view`` as a real process."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.commands import TOKCAP, clean_environment

SECONDS = 30


class Server(NamedTuple):
    """A running command: its address, and the key that it printed."""

    base: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


@contextlib.contextmanager
def running(database: Path, *arguments: object) -> Iterator[Server]:
    process = subprocess.Popen(
        [TOKCAP, "view", "-d", str(database), "--port", "0", *map(str, arguments)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"at (http://\S+/)\?key=(\S+) \(read-only; Ctrl-C ends it\)", line)
    assert found, line + process.stderr.read()
    yield Server(found[1], found[2])
    process.send_signal(signal.SIGINT)
    assert (*process.communicate(timeout=SECONDS), process.returncode) == ("", "", 0)
