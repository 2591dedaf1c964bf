"""Outputs behind a URL, such as s3://bucket/rows.parquet: any file system of fsspec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from token_id_capture.errors import ConfigurationError


def is_url(output: str) -> bool:
    """Whether ``output`` names a file system, not a file of this machine."""
    return "://" in output


@contextmanager
def remote_file(url: str, *, overwrite: bool) -> Iterator[BinaryIO]:
    """A stream to the file at ``url``, which appears when the block ends well; an error leaves nothing there.

    Raises:
        ConfigurationError: fsspec, or what it needs for this URL, is not installed; something is there already;
            or it cannot be written.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigurationError("an output at a URL needs fsspec: pip install 'token-id-capture[remote]'") from error
    try:
        system, path = url_to_fs(url)
        if not overwrite and system.exists(path):
            raise ConfigurationError(f"{url} is there already and is not replaced: name a new file, or say --overwrite")
        with system.transaction, system.open(path, "wb") as stream:
            yield stream
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"cannot write {url}: {error}") from error
