"""The documentation is true: its code runs, and it knows every command, option, reason and script."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from support.commands import RunTokcap
from token_id_capture import reasons
from token_id_capture.config import TokenIdCaptureSettings
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for folder in (".", "docs", "docs/deploy", "scripts", "src/token_id_capture/*")
    for path in ROOT.glob(f"{folder}/*.md")
)
README = (ROOT / "README.md").read_text("utf-8")
FENCE = re.compile(r"^( *)```(\w+)(?: title=\"[^\"]+\")?\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
TUTORIAL = "scripts/tutorial runs the programs of the tutorial, with torch"
NOT_RUN = {
    "agent ──►": "a picture",
    "{collector, errors, lifecycle": "compared with the imports by test_architecture",
    "multiple_roots: ": "compared with a real explanation below",
    '{"time": ': "a line of the log, shortened",
    "CREATE ROLE capture": "PostgreSQL's; tests/postgres grants the same",
    "SELECT create_": "an extension of PostgreSQL that no test installs",
    "22 rows": TUTORIAL,
    '"""A chat endpoint': TUTORIAL,
    '"""Eight rollouts': TUTORIAL,
    '"""One policy-gradient': TUTORIAL,
}
"""How the blocks begin that no test here runs, and why."""


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("document", ROOT / "scripts" / "document.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


document = load_generator()


def blocks(language: str) -> dict[str, str]:
    """The code blocks of all pages in this language that a test runs, by page and line."""
    return {
        f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}": textwrap.dedent(match[3])
        for page in PAGES
        for text in [page.read_text("utf-8")]
        for match in FENCE.finditer(text)
        if match[2] == language and not match[3].startswith(tuple(NOT_RUN))
    }


def every_block(language: str) -> pytest.MarkDecorator:
    """Run the test once for each block, under the place where it stands."""
    found = blocks(language)
    return pytest.mark.parametrize("code", list(found.values()), ids=list(found))


def test_the_generated_parts_are_up_to_date() -> None:
    assert document.COMMANDS.read_text("utf-8") == document.commands(), "run scripts/document"
    assert document.SCHEMA.read_text("utf-8") == document.schema(), "run scripts/document"
    for page, text in document.pages().items():
        assert page.read_text("utf-8") == text, "run scripts/document"


@pytest.mark.parametrize("name", list(document.all_commands()))
def test_every_command_and_every_option_is_documented(name: str) -> None:
    page = document.COMMANDS.read_text("utf-8")
    assert f"[`tokcap {name}`](#tokcap-{name})" in page
    section = page.partition(f"## tokcap {name}\n")[2].partition("\n## ")[0]
    for parameter in document.options_of(document.all_commands()[name]):
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert option in section, option
        assert parameter.help, f"{name} {parameter.name} has no help"


@pytest.mark.parametrize("name", list(document.all_commands()))
def test_the_help_of_every_command_fits_a_terminal(tokcap: RunTokcap, name: str) -> None:
    shown = tokcap(name, "--help")
    assert shown.returncode == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_every_reason_is_documented_in_its_own_words() -> None:
    page = (ROOT / "docs" / "reasons.md").read_text("utf-8")
    for table in (reasons.FLAG_REASONS, reasons.BUILD_REASONS, reasons.RELEASE_REASONS):
        for reason, sentence in table.items():
            assert f"| `{reason}` | {sentence} |" in page


def test_every_block_runs_or_is_listed_with_its_reason() -> None:
    fences = [match for page in PAGES for match in FENCE.finditer(page.read_text("utf-8"))]
    run = ("sh", "python", "json", "sql", "toml", "yaml", "mermaid")
    for match in fences:
        assert match[2] in run or match[3].startswith(tuple(NOT_RUN)), match[0]
    assert len(fences) == sum(len(re.findall(r"^ *```\w", page.read_text("utf-8"), re.MULTILINE)) for page in PAGES)
    for beginning in NOT_RUN:
        assert any(match[3].startswith(beginning) for match in fences), beginning


def test_every_setting_is_documented_with_its_default() -> None:
    [block] = [text for name, text in blocks("yaml").items() if name.startswith("configuration.md")]
    shown = dict(re.findall(r"^  (\w+): (\S+)", block, re.MULTILINE))
    defaults = TokenIdCaptureSettings().model_dump(mode="json")
    assert shown == {name: json.dumps(value) for name, value in defaults.items()}


def test_every_script_is_described() -> None:
    described = (ROOT / "scripts" / "README.md").read_text("utf-8")
    for script in (ROOT / "scripts").iterdir():
        if script.is_file() and os.access(script, os.X_OK):
            assert f"| `scripts/{script.name}` |" in described, script.name


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@every_block("sh")
def test_shell_blocks_are_shell_and_use_options_that_exist(code: str) -> None:
    subprocess.run(["bash", "-n"], input=code, text=True, check=True)
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for position, word in enumerate(words):
            if word.rpartition("/")[2] == "tokcap":
                command = document.all_commands()[words[position + 1]]
                known = {option for parameter in command.params for option in parameter.opts}
                given = itertools.takewhile("--".__ne__, words[position:])
                assert {option for option in given if option.startswith("-")} - {"-"} <= known
            elif word.startswith("scripts/"):
                assert os.access(ROOT / word, os.X_OK), word


@every_block("python")
def test_python_blocks_run(code: str, tmp_path: Path) -> None:
    if "openai" in code:
        pytest.importorskip("openai")
    program = [sys.executable, "-W", "error::ResourceWarning", "-W", "ignore:SQLite", "-c", code]
    finished = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr


def test_the_programs_of_the_tutorial_are_python_and_its_commands_use_them() -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
    programs = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE))
    for name, program in programs.items():
        compile(program, name, "exec")
        assert f"python build/tutorial/{name}" in page


@every_block("json")
def test_json_blocks_are_json(code: str) -> None:
    json.loads(code)


@every_block("toml")
def test_toml_blocks_are_toml(code: str) -> None:
    tomllib.loads(code)


@every_block("yaml")
def test_yaml_blocks_are_settings_and_name_classes_that_exist(code: str) -> None:
    [(name, settings)] = yaml.safe_load(code).items()
    assert name == "token_id_capture"
    shown = TokenIdCaptureSettings(**settings)
    for target in filter(None, (shown.sink, shown.lineage_store)):
        module, _, attribute = target.partition(":")
        assert hasattr(importlib.import_module(module), attribute), target


def test_the_trajectory_row_that_is_shown_has_the_fields_of_a_real_one(tokcap: RunTokcap, tmp_path: Path) -> None:
    database = captured(tmp_path, "17-0")
    output = tmp_path / "train.jsonl"
    record = json.dumps({"_ng_task_index": 17, "_ng_rollout_index": 0, "reward": 1.0})
    done = tokcap("finalize", "-", "-d", database, "-o", output, "--format", "trajectory", stdin=record)
    assert done.returncode == 0, done.stderr
    [shown] = [row for row in map(json.loads, blocks("json").values()) if "token_ids" in row]
    assert list(json.loads(output.read_text())) == list(shown)
    assert len(shown["token_ids"]) == len(shown["loss_mask"]) == len(shown["log_probs"])
    rows = (ROOT / "docs" / "rows.md").read_text("utf-8")
    table = rows.partition("## `--format trajectory`")[2].partition("```json")[0]
    described = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE)
    fields = {name for row in described for name in re.findall(r"\w+", row)}
    assert fields == set(shown) - {"_ng_task_index", "_ng_rollout_index", "reward", "_ng_token_capture"}


def test_the_explanation_that_is_shown_is_a_real_one(tokcap: RunTokcap, tmp_path: Path) -> None:
    shown = README.partition("```text\nmultiple_roots: ")[2].partition("```")[0]
    assert shown
    prompt = [151644, 872, 198, 3838, 374, 220, 17, 10, 17, 30, 151645, 198, 151644, 77091, 198]
    beginning, end = [785, 4226, 374], [11, 438, 220, 17, 10, 17, 28, 19, 11, 323, 419, 374, 1921, 13, 151645]
    again = [*prompt, *beginning, 31123, *end, 198, 151644, 872, 198, 9454, 30, 151645, 198]

    async def drift() -> None:
        async with TokenCaptureStore(tmp_path / "captures.db") as store:
            await store.put(call("math-17-0", "call-1", prompt, [*beginning, 220, 19, *end]))
            await store.put(call("math-17-0", "call-2", again, [9454, 13, 151645]))

    asyncio.run(drift())
    told = tokcap("explain", "math-17-0", "-d", tmp_path / "captures.db").stdout.splitlines()
    for line in f"multiple_roots: {shown}".splitlines():
        assert any(real == line or (line.endswith(" ...") and real.startswith(line[:-3])) for real in told), line


@every_block("sql")
def test_sql_blocks_run_and_those_of_the_readme_find_something(code: str, tmp_path: Path) -> None:
    database = captured(tmp_path, "math-17-0")
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        found = [connection.execute(statement).fetchall() for statement in code.split(";") if statement.strip()]
    assert all(found) or code not in README, found


def call(rollout_id: str, call_id: str, prompt: list[int], generation: list[int]) -> TokenEntry:
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call_id,
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.1] * len(generation),
    )


def captured(directory: Path, rollout_id: str) -> Path:
    """A database with this rollout, whole, and with another one that lost a call and was masked."""

    async def fill() -> Path:
        async with TokenCaptureStore(directory / "captures.db") as store:
            await store.put(call(rollout_id, "call-1", [1, 2], [10, 11]))
            await store.begin_call("lost-0", "call-9")
            snapshot = await store.freeze("lost-0")
            await store.record_outcome(snapshot.snapshot_id, snapshot.version, "masked", reasons.CAPTURE_INCOMPLETE)
            return store.database

    return asyncio.run(fill())


def test_the_readme_is_read_in_some_minutes() -> None:
    assert len(README.splitlines()) < 200
