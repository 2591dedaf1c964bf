"""Outputs behind a URL, such as s3://bucket/rows.parquet: any file system of fsspec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from token_id_capture.errors import ConfigurationError


def is_url(output: str) -> bool:
    """Whether ``output`` names a file system, not a file of this machine."""
    return "://" in output


@contextmanager
def remote_files(url: str) -> Iterator[Callable[[str], BinaryIO]]:
    """A function that opens the next file, of which the one before is complete then.

    The files are on the file system of ``url`` and appear when the block ends well; an error leaves none there.

    Raises:
        ConfigurationError: fsspec, or what it needs for this URL, is not installed; or it cannot be written.
    """
    streams: list[BinaryIO] = []

    def complete() -> None:
        if streams:
            streams.pop().close()

    with _errors_named(url):
        system, _ = _file_system(url)

        def open_next(name: str) -> BinaryIO:
            complete()
            streams.append(system.open(system._strip_protocol(name), "wb"))
            return streams[-1]

        with system.transaction:
            yield open_next
            complete()


def remote_names(pattern: str) -> list[str]:
    """The URLs that are there and match ``pattern``, in which ``[0-9]`` is a digit; as for ``remote_files``."""
    with _errors_named(pattern):
        system, path = _file_system(pattern)
        return [str(system.unstrip_protocol(found)) for found in system.glob(path)]


def remove_remote(url: str) -> None:
    """Delete the file at ``url``; as for ``remote_files``."""
    with _errors_named(url):
        system, path = _file_system(url)
        system.rm_file(path)


def _file_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigurationError("an output at a URL needs fsspec: pip install 'token-id-capture[remote]'") from error
    system, path = url_to_fs(url)
    return system, path


@contextmanager
def _errors_named(url: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        if isinstance(error, ConfigurationError):
            raise
        # Of what it cannot do at all, as to write over HTTP, fsspec says nothing.
        raise ConfigurationError(f"cannot write {url}: {str(error) or 'this kind of URL can only be read'}") from error
