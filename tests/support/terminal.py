"""The installed command on a pseudo-terminal, as a person sees it."""

from __future__ import annotations

import os
import pty
import subprocess

from support.commands import TOKCAP, clean_environment


def on_terminal(columns: int, *arguments: object, **environment: str) -> str:
    """What the command writes to a terminal of this width, which must be without a complaint."""
    leader, follower = pty.openpty()
    subprocess.run(["stty", "cols", str(columns)], stdin=follower, check=True)
    command = [str(TOKCAP), *map(str, arguments)]
    streams = {"stdin": follower, "stdout": follower, "stderr": follower}
    with subprocess.Popen(command, env={**clean_environment(), **environment}, **streams) as process:  # type: ignore[call-overload]
        os.close(follower)
        shown = b""
        try:
            while part := os.read(leader, 1 << 16):
                shown += part
        except OSError:  # the other side is closed: EIO on Linux
            pass
        os.close(leader)
        assert process.wait(timeout=60) == 0, shown
    return shown.decode().replace("\r\n", "\n")
