"""Key files: what a key is, and what is said of a file that cannot hold one."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from token_id_capture.cli.serving.keys import check_key_file, read_key
from token_id_capture.errors import ConfigurationError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(0o600)
    return path


@pytest.mark.parametrize("content", ["key-1", "key-1\n", "  key-1 \r\n", "\n\nkey-1"])
def test_blanks_around_a_key_do_not_count(file: Path, content: str) -> None:
    file.write_text(content)
    assert read_key(file) == "key-1"


@pytest.mark.parametrize("content", ["", " ", "\n \n"])
def test_an_empty_file_is_no_key(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=r"the key file .*/key is empty: write the key into it"):
        read_key(file)


@pytest.mark.parametrize("content", [b"a\nb", b"a b", "ü".encode(), b"a\0b", b"a" * 5000, b"\xff"])
def test_a_key_is_one_line_of_printable_ascii(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="must hold one key: printable ASCII without spaces, on one line"):
        read_key(file)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the key file .*/missing: No such file or directory"):
        read_key(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match=r"cannot read the key file .*: Is a directory"):
        read_key(tmp_path)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)])
def test_a_key_that_every_user_can_see_or_change_is_warned_of(file: Path, mode: int, warned: bool) -> None:
    file.write_text("hush")
    file.chmod(mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_key_file(file)
    told = f"every user of this machine may read or change the key in {file}: chmod 600 {file}"
    assert [str(warning.message) for warning in caught] == ([told] if warned else [])
