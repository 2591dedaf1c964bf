"""What a command loads before it can answer: nearly all of its time is spent on imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.captured import filled, finish, put_chain
from support.commands import clean_environment
from token_id_capture.store import TokenCaptureStore

PROGRAM = """
import json, sys
from token_id_capture.cli.main import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""

# What serving, storing, exporting and drawing need, and looking does not.
WORKING = {
    *("aiohttp", "aiosqlite", "alembic", "datasette", "jinja2", "prometheus_client", "pyarrow", "pydantic_settings"),
    *("rich", "sqlalchemy", "starlette", "tokenizers", "uvicorn", "token_id_capture.store.store"),
}
# What it takes to read calls with their tokens, and to build. (The library of the command line may bring pydantic.)
BUILDING = {"asyncio", "token_id_capture.records", "token_id_capture.builder", "token_id_capture.consumer"}


async def one_masked(store: TokenCaptureStore) -> None:
    await put_chain(store, "masked")
    await finish(store, "masked", "masked", "multiple_roots")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("start") / "captures.db", one_masked)


def loaded_by(*arguments: object) -> set[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    run = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(run.stderr.splitlines()[-1]))


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_no_library_but_that_of_the_command_line(option: str) -> None:
    assert not loaded_by(option) & (WORKING | BUILDING | {"orjson", "sqlite3"})


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--masked", "--json"], ["sql", "SELECT * FROM kept_evidence"]])
def test_rows_come_without_what_makes_or_checks_records(database: Path, arguments: list[str]) -> None:
    assert not loaded_by(*arguments, "--database", database) & (WORKING | BUILDING)


@pytest.mark.parametrize("command", ["show", "explain"])
def test_one_rollout_comes_without_what_writes_to_the_database(database: Path, command: str) -> None:
    assert not loaded_by(command, "masked", "--database", database) & WORKING


def test_a_page_comes_without_what_writes_to_the_database(database: Path, tmp_path: Path) -> None:
    loaded = loaded_by("report", "masked", "--database", database, "--output", tmp_path / "masked.html")
    assert not loaded & (WORKING - {"jinja2"})
