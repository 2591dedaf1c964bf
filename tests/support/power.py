"""What a disk may hold after the power failed: made from a trace of ``interpose.c``.

A write, a truncation, a new name or a removed name is certain only once the file, or the directory,
was synced after it. Whatever was not synced may be there or not, each sector of a write by itself.
A sync that fails leaves pages that are read as they were written, count as clean, and are on no disk:
only once a page is written to again does a later sync write it, all of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from support.interposer import Operation

SECTOR = 512
PAGE = 4096


@dataclass(slots=True)
class File:
    """What is certain of a file, what was done to it since its latest sync, and what its readers see."""

    certain: bytes = b""
    uncertain: list[Operation] = field(default_factory=list)
    seen: bytearray = field(default_factory=bytearray)
    forgotten: set[int] = field(default_factory=set)
    """Pages that a failed sync left clean and did not write."""

    def change(self, operation: Operation) -> None:
        """A write or a truncation."""
        if operation.kind == "truncate":
            del self.seen[operation.offset :]
            self.forgotten = {page for page in self.forgotten if page * PAGE < operation.offset}
        else:
            _write(self.seen, operation.offset, operation.data)
            pages = _pages(operation)
            for page in self.forgotten & pages:
                content = bytes(self.seen[page * PAGE : (page + 1) * PAGE])
                self.uncertain.append(Operation("write", operation.name, page * PAGE, content))
            self.forgotten -= pages
        self.uncertain.append(operation)

    def sync(self) -> None:
        self.certain = self.after_power_loss(1.0, random.Random())
        self.uncertain.clear()

    def fail_to_sync(self) -> None:
        written = [operation for operation in self.uncertain if operation.kind == "write"]
        for operation in written:
            self.forgotten |= _pages(operation)
        kept = [operation for operation in self.uncertain if operation.kind != "write"]
        # The file's length may get to the disk without its content.
        grown = [Operation("grow", written[0].name, len(self.seen), b"")] if written else []
        self.uncertain = [*kept, *grown]

    def after_power_loss(self, share: float, dice: random.Random) -> bytes:
        """The content, if this share of all uncertain sectors came to the disk."""
        content = bytearray(self.certain)
        for operation in self.uncertain:
            if operation.kind == "truncate":
                if dice.random() < share:
                    del content[operation.offset :]
                continue
            if operation.kind == "grow":
                if dice.random() < share:
                    content.extend(bytes(max(0, operation.offset - len(content))))
                continue
            for start in range(0, len(operation.data), SECTOR):
                if dice.random() < share:
                    _write(content, operation.offset + start, operation.data[start : start + SECTOR])
        return bytes(content)


def _pages(operation: Operation) -> set[int]:
    return set(range(operation.offset // PAGE, (operation.offset + len(operation.data) - 1) // PAGE + 1))


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
            self._files.setdefault(operation.name, File()).change(operation)
        elif operation.kind == "sync":
            self._files.setdefault(operation.name, File()).sync()
        elif operation.kind == "failed sync":
            self._files.setdefault(operation.name, File()).fail_to_sync()

    def lose_power(self, directory: Path, share: float, dice: random.Random) -> None:
        """Write what is left to ``directory``; ``share`` of what is uncertain came to the disk."""
        for name in {*self._files, *self._names_on_disk}:
            file = (self._files if dice.random() < share else self._names_on_disk).get(name)
            if file is not None:
                (directory / name).write_bytes(file.after_power_loss(share, dice))
