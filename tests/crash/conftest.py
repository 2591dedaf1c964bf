"""What the tests with real processes share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from support import interposer
from support.children import Child, Children, Start


@pytest.fixture(scope="session")
def child_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    library = None if interposer.why_not() else interposer.build(tmp_path_factory.mktemp("interposer"))
    server = Children(library)
    yield server
    server.close()


@pytest.fixture
def start(child_server: Children, tmp_path: Path) -> Iterator[Start]:
    """Start a function of ``programs`` in a process of its own, which does not outlive the test."""
    numbers = count()

    def start_child(program: str, *arguments: Any, **options: Any) -> Child:
        output = tmp_path / f"{program}-{next(numbers)}.output"
        return child_server.start(program, *arguments, output=output, **options)

    yield start_child
    child_server.end_all()


@pytest.fixture
def control(tmp_path: Path) -> interposer.Control:
    """The counters and faults of ``interpose.c``; give its path to ``start``."""
    if reason := interposer.why_not():
        pytest.skip(reason)
    return interposer.Control(tmp_path / "control")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    directory = tmp_path / "captures"
    directory.mkdir()
    return directory / "captures.db"
