"""What a command loads before it can answer: nearly all of its time is spent on imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.captured import filled, finish, put_chain
from support.commands import RunInstalled, RunTokcap, clean_environment
from token_id_capture.cli import main as main_module
from token_id_capture.cli.main import SUMMARIES, Commands
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
    *("aiohttp", "aiosqlite", "alembic", "datasette", "prometheus_client", "pyarrow", "pydantic_settings"),
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


def test_the_table_of_commands_says_what_each_says_of_itself() -> None:
    commands = Commands()
    said = {name: commands[name].help.partition("\n\n")[0].split() for name in commands}
    assert said == {name: summary.split() for name, summary in SUMMARIES.items()}
    folder = Path(main_module.__file__).parent / "commands"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert set(commands) == modules | {"demo"}
    assert list(commands) == sorted(commands)


def test_a_command_is_loaded_without_the_others(database: Path) -> None:
    ours = {name for name in loaded_by("--help") if name.startswith("token_id_capture.cli")}
    assert ours == {"token_id_capture.cli", "token_id_capture.cli.main", "token_id_capture.cli.options"}
    commands = {name for name in loaded_by("ls", "-d", database) if name.startswith("token_id_capture.cli.commands.")}
    assert commands == {"token_id_capture.cli.commands.ls"}


@pytest.mark.parametrize("arguments", [[], ["ls"], ["serve"]])
def test_h_is_help(tokcap: RunTokcap, arguments: list[str]) -> None:
    assert tokcap(*arguments, "-h").stdout == tokcap(*arguments, "--help").stdout != ""


def test_a_mistyped_command_is_told_the_one_that_was_meant(tokcap: RunTokcap) -> None:
    refused = tokcap("explian")
    assert refused.returncode == 2
    assert "No such command 'explian'. Did you mean 'explain'" in refused.stderr


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("tokcap e", {"explain", "export"}),
        ("tokcap ls --m", {"--masked", "--model"}),
        ("tokcap ls --state f", {"frozen"}),
    ],
)
def test_a_shell_completes_commands_options_and_choices(
    run_installed: RunInstalled, words: str, completions: set[str]
) -> None:
    asked = {"_TOKCAP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    answered = run_installed(env={**clean_environment(), **asked}, capture_output=True)
    assert (set(answered.stdout.decode().split()), answered.stderr) == (completions, b"")


def test_the_script_for_a_shell_can_be_shown(run_installed: RunInstalled) -> None:
    shown = run_installed("--show-completion", "bash", capture_output=True)
    assert b"complete -o default -F _tokcap_completion tokcap" in shown.stdout


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--masked", "--json"], ["sql", "SELECT * FROM kept_evidence"]])
def test_rows_come_without_what_makes_or_checks_records(database: Path, arguments: list[str]) -> None:
    assert not loaded_by(*arguments, "--database", database) & (WORKING | BUILDING)


@pytest.mark.parametrize("command", ["show", "explain"])
def test_one_rollout_comes_without_what_writes_to_the_database(database: Path, command: str) -> None:
    assert not loaded_by(command, "masked", "--database", database) & WORKING


def test_a_page_comes_without_what_writes_to_the_database(database: Path, tmp_path: Path) -> None:
    page = tmp_path / "masked.html"
    assert not loaded_by("report", "masked", "--database", database, "--output", page) & WORKING
