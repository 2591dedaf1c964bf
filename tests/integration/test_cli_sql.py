"""``tokcap sql``: what it prints, what it refuses, and that it leaves the database and its writers alone."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from support.commands import TOKCAP, RunTokcap, clean_environment
from support.terminal import on_terminal
from token_id_capture.errors import StatementError
from token_id_capture.records import TokenEntry
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.read.sql import sql_reader

ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) "
TOKENS = [4, 2**32 - 1]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sql") / "captures.db"
    entry = TokenEntry(
        rollout_id="math-0",
        model_call_id="first",
        prompt_token_ids=[1, 2, 3],
        generation_token_ids=TOKENS,
        generation_log_probs=[-0.5, -1.25],
    )

    async def fill() -> None:
        async with TokenCaptureStore(path) as store:
            await store.put(entry)
            await store.mark_incomplete("math-0", "first", "lost_stream: \x1b]0;owned\x07\nsecond line")

    asyncio.run(fill())
    return path


def everything(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def test_a_table_has_plain_columns(tokcap: RunTokcap, database: Path) -> None:
    shown = tokcap(
        "sql", "-d", database, "SELECT rollout_id, calls, NULL AS missing, 1.5 AS half FROM rollout_overview"
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == "rollout_id  calls  missing  half\nmath-0          1     NULL   1.5\n"


def test_no_rows_are_a_header(tokcap: RunTokcap, database: Path) -> None:
    assert tokcap("sql", "-d", database, "SELECT pid FROM lost_calls").stdout == "pid\n"
    assert json.loads(tokcap("sql", "-d", database, "--json", "SELECT pid FROM lost_calls").stdout) == []
    assert tokcap("sql", "-d", database, "--csv", "SELECT pid FROM lost_calls").stdout == "pid\n"


def test_packed_columns_are_sizes_in_a_table_and_arrays_by_the_functions(tokcap: RunTokcap, database: Path) -> None:
    table = tokcap("sql", "-d", database, "SELECT generation FROM entries").stdout
    assert table == "generation\n<8 bytes>\n"
    statement = "SELECT token_ids(generation) AS ids, log_probs(log_probs) AS lp, token_ids(NULL) AS none FROM entries"
    (row,) = json.loads(tokcap("sql", "-d", database, "--json", statement).stdout)
    assert (json.loads(row["ids"]), json.loads(row["lp"]), row["none"]) == (TOKENS, [-0.5, -1.25], None)


def test_json_and_csv_print_blobs_in_hexadecimal(tokcap: RunTokcap, database: Path) -> None:
    statement = "SELECT generation AS g, NULL AS n, 'a,\"b' AS t, 1 AS x, 2 AS x FROM entries"
    assert json.loads(tokcap("sql", "-d", database, "--json", statement).stdout) == [
        {"g": "04000000ffffffff", "n": None, "t": 'a,"b', "x": 1, "x_2": 2}
    ]
    rows = list(csv.reader(io.StringIO(tokcap("sql", "-d", database, "--csv", statement).stdout)))
    assert rows == [["g", "n", "t", "x", "x"], ["04000000ffffffff", "", 'a,"b', "1", "2"]]


def test_a_long_result_comes_whole_in_every_form(tokcap: RunTokcap, database: Path) -> None:
    statement = ENDLESS + "SELECT n, n * 2 AS m FROM c LIMIT 5000"
    table = tokcap("sql", "-d", database, statement).stdout.splitlines()
    assert [line.split() for line in table[1:]] == [[str(n), str(2 * n)] for n in range(1, 5001)]
    assert [row["m"] for row in json.loads(tokcap("sql", "-d", database, "--json", statement).stdout)][-1] == 10_000
    assert len(tokcap("sql", "-d", database, "--csv", statement).stdout.splitlines()) == 5001


@pytest.mark.parametrize(
    "statement",
    [
        "-- how many\nSELECT 7 AS n",
        "--how many\nSELECT 7 AS n",
        "--\tin tabs = 1\nSELECT 7 AS n",
        "-- json\nSELECT 7 AS n -- done",
    ],
)
def test_a_statement_that_begins_with_a_comment_is_no_option(tokcap: RunTokcap, database: Path, statement: str) -> None:
    for arguments in (
        ["-d", database, statement],
        [statement, f"--database={database}"],
        ["-d", database, "--", statement],
    ):
        assert tokcap("sql", *arguments).stdout == "n\n7\n"
    assert "No such option: --jsno" in tokcap("sql", "-d", database, "--jsno", statement).stderr


@pytest.mark.parametrize("arguments", [["-"], []])
def test_the_statement_may_come_from_a_pipe(tokcap: RunTokcap, database: Path, arguments: list[str]) -> None:
    shown = tokcap("sql", "-d", database, *arguments, stdin="SELECT state FROM rollouts;\n")
    assert shown.stdout == "state\nopen\n"


def test_text_from_an_engine_cannot_steer_the_terminal(tokcap: RunTokcap, database: Path) -> None:
    shown = tokcap("sql", "-d", database, "SELECT detail FROM incomplete_flags").stdout
    assert "\\x1b]0;owned\\x07\\nsecond line" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("statement", "refused"),
    [
        ("DELETE FROM entries", "DELETE"),
        ("INSERT INTO numbers VALUES (5000)", "INSERT"),
        ("UPDATE rollouts SET state = 'open'", "UPDATE"),
        ("REPLACE INTO numbers VALUES (1)", "REPLACE"),
        ("WITH x AS (SELECT 1) DELETE FROM entries", "DELETE entries"),
        ("/* first */ -- then\n DROP VIEW call_chain", "DROP"),
        ("CREATE TABLE t (a)", "CREATE"),
        ("CREATE TEMP TABLE t (a)", "CREATE"),
        ("CREATE TEMP TRIGGER t AFTER INSERT ON rollouts BEGIN SELECT 1; END", "CREATE"),
        ("CREATE VIRTUAL TABLE t USING fts5(a)", "CREATE"),
        ("ALTER TABLE rollouts ADD COLUMN x", "ALTER"),
        ("ATTACH 'other.db' AS other", "ATTACH"),
        ("DETACH main", "DETACH"),
        ("VACUUM", "VACUUM"),
        ("VACUUM INTO 'copy.db'", "VACUUM"),
        ("ANALYZE", "ANALYZE"),
        ("REINDEX", "REINDEX"),
        ("BEGIN IMMEDIATE", "BEGIN"),
        ("BEGIN", "BEGIN"),
        ("SAVEPOINT s", "SAVEPOINT"),
        ("PRAGMA user_version = 3", "PRAGMA user_version"),
        ("PRAGMA journal_mode = DELETE", "PRAGMA journal_mode"),
        ("PRAGMA query_only = OFF", "PRAGMA query_only"),
        ("PRAGMA writable_schema = ON", "PRAGMA writable_schema"),
        ("PRAGMA wal_checkpoint", "PRAGMA wal_checkpoint"),
        ("PRAGMA optimize", "PRAGMA optimize"),
        ("PRAGMA incremental_vacuum", "PRAGMA incremental_vacuum"),
        ("PRAGMA temp_store_directory = '/'", "PRAGMA temp_store_directory"),
        ("SELECT load_extension('nothing')", "the function load_extension"),
    ],
)
def test_whatever_does_more_than_read_is_refused_by_name(database: Path, statement: str, refused: str) -> None:
    before = everything(database)
    with (
        sql_reader(database) as reader,
        pytest.raises(StatementError, match=f"^{refused} is refused: only statements that read are run$"),
        reader.query(statement),
    ):
        pass
    assert everything(database) == before
    assert not Path("other.db").exists()
    assert not Path("copy.db").exists()


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM kept_evidence",
        "VALUES (1), (2)",
        "WITH x AS (SELECT 1 AS a) SELECT a FROM x",
        "EXPLAIN QUERY PLAN SELECT * FROM rollouts",
        "PRAGMA table_info(entries)",
        "PRAGMA integrity_check",
        "PRAGMA journal_mode",
        "SELECT name FROM pragma_table_info('entries')",
        "SELECT value FROM json_each('[1, 2]')",
        "SELECT row_number() OVER (ORDER BY n) FROM numbers LIMIT 3",
        "SELECT * FROM sqlite_schema",
    ],
)
def test_whatever_only_reads_is_run(database: Path, statement: str) -> None:
    with sql_reader(database) as reader, reader.query(statement) as (columns, pages):
        assert columns
        assert [row for page in pages for row in page] or "kept_evidence" in statement


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("SELECT missing FROM rollouts", "no such column: missing"),
        ("SELECT 1; SELECT 2", "there is more than one statement"),
        ("SELECT 1; DELETE FROM entries", "there is more than one statement"),
        ("", "there is no statement"),
        ("-- only a comment", "there is no statement"),
        ("SELECT ?", "the statement has parameters"),
        ("SELECT token_ids('text')", "token_ids() takes a blob, such as entries.generation, not str"),
        ("SELECT token_ids(x'0000')", "token_ids(): 2 bytes do not divide into items of 4 bytes"),
        ("SELECT log_probs(x'0000')", "log_probs(): 2 bytes do not divide into items of 8 bytes"),
    ],
)
def test_a_statement_that_cannot_be_run_is_one_line(
    tokcap: RunTokcap, database: Path, statement: str, problem: str
) -> None:
    refused = tokcap("sql", "-d", database, "-", stdin=statement)
    assert refused.returncode == 2
    assert problem in refused.stderr
    assert refused.stderr.startswith("tokcap: ")
    assert refused.stderr.count("\n") == 1
    assert refused.stdout == ""


def test_an_error_in_a_late_row_ends_with_code_2(tokcap: RunTokcap, database: Path) -> None:
    statement = ENDLESS + "SELECT CASE WHEN n < 1000 THEN n ELSE token_ids('text') END FROM c LIMIT 2000"
    failed = tokcap("sql", "-d", database, statement, "--csv")
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)


def test_two_forms_at_once_and_a_missing_database_are_refused(
    tokcap: RunTokcap, database: Path, tmp_path: Path
) -> None:
    refused = tokcap("sql", "-d", database, "SELECT 1", "--json", "--csv")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    missing = tokcap("sql", "-d", tmp_path / "none.db", "SELECT 1")
    assert missing.returncode == 2
    assert "there is no capture database" in missing.stderr
    assert not (tmp_path / "none.db").exists()


def test_text_that_is_no_utf8_is_shown(tokcap: RunTokcap, database: Path) -> None:
    shown = tokcap("sql", "-d", database, "SELECT CAST(x'61ff62' AS TEXT) AS t", "--json")
    assert json.loads(shown.stdout) == [{"t": "a\ufffdb"}]


def open_files(pid: int) -> list[str]:
    links = []
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(link))
    return links


@contextlib.contextmanager
def started(*arguments: object, stdout: int | IO[bytes] = subprocess.PIPE) -> Iterator[subprocess.Popen[bytes]]:
    """The command at work; an endless query does not outlive its test."""
    command = [str(TOKCAP), *map(str, arguments)]
    with subprocess.Popen(command, env=clean_environment(), stdout=stdout, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


def test_ctrl_c_ends_a_query_in_the_middle_without_a_word(database: Path) -> None:
    with started("sql", "-d", database, "--csv", ENDLESS + "SELECT n FROM c") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"n\n"
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=30)
    assert (process.returncode, complaint) == (130, b"")


def test_ctrl_c_while_the_first_row_is_sought(database: Path) -> None:
    with started("sql", "-d", database, ENDLESS + "SELECT sum(n) FROM c") as process:
        # The database is open once the query runs, or is about to.
        until(lambda: any("captures.db" in link for link in open_files(process.pid)))
        process.send_signal(signal.SIGINT)
        out, complaint = process.communicate(timeout=30)
    assert (process.returncode, out, complaint) == (130, b"", b"")


def test_a_reader_that_leaves_ends_the_query_without_a_word(database: Path) -> None:
    with started("sql", "-d", database, ENDLESS + "SELECT n FROM c") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=30) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize("select", ["SELECT 1", ENDLESS + "SELECT n FROM c"])
def test_a_full_disk_behind_standard_output_is_one_line(database: Path, select: str) -> None:
    with open("/dev/full", "wb") as full, started("sql", "-d", database, select, stdout=full) as process:
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 2
    assert complaint == b"tokcap: the result cannot be written: No space left on device\n"


def test_a_closed_standard_output_gets_no_traceback(database: Path) -> None:
    shell = f'exec "{TOKCAP}" sql -d "{database}" "SELECT 1" >&-'
    left = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (left.returncode, left.stderr) == (0, b"")


async def test_a_person_who_pages_through_a_result_does_not_pin_the_log(tmp_path: Path) -> None:
    async with TokenCaptureStore(tmp_path / "captures.db") as store:
        await store.open()
        statement = ENDLESS + "SELECT n, 'as much text as makes the pipe run full many times over' FROM c LIMIT 20000"
        with started("sql", "-d", store.database, "--csv", statement) as process:
            assert process.stdout is not None
            # Somebody reads the first line, and then goes for lunch with a full pipe.
            assert process.stdout.readline().startswith(b"n,")
            until(lambda: not any("captures.db" in link for link in open_files(process.pid)))
            lines = process.stdout.read().splitlines()
            assert process.wait(timeout=30) == 0
        assert len(lines) == 20_000


def test_a_narrow_terminal_gets_blocks(database: Path) -> None:
    statement = "SELECT rollout_id, model_call_id, reason FROM incomplete_flags"
    assert on_terminal(30, "sql", "-d", database, statement, TERM="dumb").splitlines() == [
        "rollout_id     math-0",
        "model_call_id  first",
        "reason         lost_stream",
    ]


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "dumb", "NO_COLOR": "1"}])
def test_a_wide_terminal_gets_columns_without_escapes(database: Path, environment: dict[str, str]) -> None:
    shown = on_terminal(100, "sql", "-d", database, "SELECT state, version FROM rollouts", **environment)
    assert shown == "state  version\nopen         1\n"


def test_a_terminal_without_a_statement_is_told_what_to_write(database: Path) -> None:
    leader, follower = pty.openpty()
    try:
        command = [str(TOKCAP), "sql", "-d", str(database)]
        ran = subprocess.run(
            command, stdin=follower, capture_output=True, env=clean_environment(), timeout=60, check=False
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert ran.returncode == 2
    assert ran.stderr.startswith(b"tokcap: there is no statement")


def test_a_large_result_is_streamed_in_flat_memory(database: Path) -> None:
    program = (
        "import resource, sys; from token_id_capture.cli.main import main\n"
        "sys.argv[0] = 'tokcap'\n"
        "try: main()\n"
        "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )

    def kilobytes(rows: int) -> int:
        statement = ENDLESS + f"SELECT n, '{'x' * 1000}' FROM c LIMIT {rows}"
        command = [sys.executable, "-c", program, "sql", "-d", str(database), "--csv", statement]
        with open(os.devnull, "wb") as nowhere:
            ran = subprocess.run(command, stdout=nowhere, stderr=subprocess.PIPE, timeout=60, check=True)
        return int(ran.stderr)

    assert kilobytes(30_000) - kilobytes(1_000) < 12_000  # the result is 30 MB
