"""What a disk may hold after the power failed: made from a trace of ``interpose.c``.

A write, a truncation, a new name or a removed name is certain only once the file, or the directory,
was synced after it. Whatever was not synced may be there or not, each sector of a write by itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from support.interposer import Operation

SECTOR = 512


@dataclass(slots=True)
class File:
    """What is certain of a file, and what was done to it since its latest sync."""

    certain: bytes = b""
    uncertain: list[Operation] = field(default_factory=list)

    def sync(self) -> None:
        self.certain = self.after_power_loss(1.0, random.Random())
        self.uncertain.clear()

    def after_power_loss(self, share: float, dice: random.Random) -> bytes:
        """The content, if this share of all uncertain sectors came to the disk."""
        content = bytearray(self.certain)
        for operation in self.uncertain:
            if operation.kind == "truncate":
                if dice.random() < share:
                    del content[operation.offset :]
                continue
            for start in range(0, len(operation.data), SECTOR):
                if dice.random() < share:
                    _write(content, operation.offset + start, operation.data[start : start + SECTOR])
        return bytes(content)


def _write(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


class Disk:
    """One directory of files. ``apply`` the trace, and ask at any point what may be left."""

    def __init__(self) -> None:
        self._files: dict[str, File] = {}
        self._names_on_disk: dict[str, File] = {}

    def apply(self, operation: Operation) -> None:
        """Do what the process did next."""
        if operation.kind == "sync" and not operation.name:
            self._names_on_disk = dict(self._files)
        elif operation.kind == "unlink":
            self._files.pop(operation.name, None)
        elif operation.kind in ("write", "truncate"):
            self._files.setdefault(operation.name, File()).uncertain.append(operation)
        elif operation.kind == "sync":
            self._files.setdefault(operation.name, File()).sync()

    def lose_power(self, directory: Path, share: float, dice: random.Random) -> None:
        """Write what is left to ``directory``; ``share`` of what is uncertain came to the disk."""
        for name in {*self._files, *self._names_on_disk}:
            file = (self._files if dice.random() < share else self._names_on_disk).get(name)
            if file is not None:
                (directory / name).write_bytes(file.after_power_loss(share, dice))
