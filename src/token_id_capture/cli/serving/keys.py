"""Keys that are read from files: on a command line or in a variable other processes could see them."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path
from typing import Final

from token_id_capture.cli.options import printable
from token_id_capture.errors import ConfigurationError

_LONGEST: Final = 4096


def read_key(path: str | os.PathLike[str]) -> str:
    """The key in a file: one line of printable ASCII without spaces; blanks around it are taken off.

    Raises:
        ConfigurationError: the file cannot be read, or it does not hold such a key.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(_LONGEST + 1).strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read the key file {path}: {error.strerror or error}") from error
    if not raw:
        raise ConfigurationError(f"the key file {path} is empty: write the key into it")
    if len(raw) > _LONGEST or not all(0x20 < byte < 0x7F for byte in raw):
        raise ConfigurationError(f"the key file {path} must hold one key: printable ASCII without spaces, on one line")
    return raw.decode("ascii")


def refuse_one_key(agents: str | None, other: str | None) -> None:
    """See to it that the key of agents opens nothing else; both are files.

    Raises:
        ConfigurationError: both hold the same key, or as for ``read_key``.
    """
    if agents is not None and other is not None and read_key(agents) == read_key(other):
        raise ConfigurationError(f"{other} holds the key of --api-key-file, which agents know: use a different key")


def check_key_file(path: Path) -> None:
    """Read the key once, and say so where others may read or replace the file.

    That is not a refusal: secrets that are mounted into containers usually are readable by all.

    Raises:
        ConfigurationError: as for ``read_key``.
    """
    read_key(path)
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        shown = printable(str(path))
        warnings.warn(
            f"every user of this machine may read or change the key in {shown}: chmod 600 {shown}", stacklevel=2
        )
