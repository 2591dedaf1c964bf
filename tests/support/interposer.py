"""The test's side of ``interpose.c``: build it, read its counters and its trace, set its faults."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("interpose.c")

_FIELDS = {
    **dict.fromkeys(("operations", "kill_at", "log_syncs", "database_syncs", "directory_syncs", "log_writes"), "q"),
    **dict.fromkeys(("sync_error", "sync_failures", "write_error", "injected"), "i"),
    **dict.fromkeys(("log_sync_faults", "database_sync_faults", "database_write_faults"), "i"),
}
_SIZE = struct.calcsize("<" + "".join(_FIELDS.values()))
_RECORD = struct.Struct("<iiqq")


def why_not() -> str:
    """Why this machine cannot interpose a library; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "LD_PRELOAD and /proc/self/fd are Linux"
    return "" if shutil.which("cc") else "there is no C compiler (cc)"


def build(directory: Path) -> Path:
    """Compile the library into ``directory``."""
    library = directory / "interpose.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-o", library, SOURCE, "-ldl"],
        check=True,
        capture_output=True,
    )
    return library


class Control:
    """The block of memory that the test and the interposed processes share; an attribute a field."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)

    def __getattr__(self, name: str) -> int:
        if name not in _FIELDS:
            raise AttributeError(name)
        (value,) = struct.unpack_from(f"<{_FIELDS[name]}", self._memory, _offset(name))
        return int(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS:
            super().__setattr__(name, value)
        else:
            struct.pack_into(f"<{_FIELDS[name]}", self._memory, _offset(name), value)

    def reset(self) -> None:
        """Set every counter and every fault to zero."""
        self._memory[:] = bytes(_SIZE)


def _offset(name: str) -> int:
    return struct.calcsize("<" + "".join(_FIELDS.values())[: list(_FIELDS).index(name)])


@dataclass(frozen=True, slots=True)
class Operation:
    """One record of the trace."""

    kind: str
    name: str
    offset: int
    data: bytes


_KINDS = {1: "write", 2: "truncate", 3: "sync", 4: "unlink", 5: "acknowledge", 6: "failed sync"}


def read_trace(path: Path) -> Iterator[Operation]:
    """The operations in the order in which they happened."""
    content = path.read_bytes()
    position = 0
    while position < len(content):
        kind, name_length, offset, length = _RECORD.unpack_from(content, position)
        position += _RECORD.size
        name = content[position : position + name_length].decode()
        position += name_length
        data = content[position : position + length]
        position += length
        yield Operation(_KINDS[kind], name, offset, data)
