"""Every command says of a database on a server what it says of a file with the same content."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.captured import WAITS_FOR_EVER, entry, filled, finish, one_line, process, put_chain
from support.commands import RunTokcap
from support.postgres import PASSWORD, PostgresServer
from token_id_capture.errors import StatementError
from token_id_capture.lifecycle import CallOrigin, Purpose
from token_id_capture.store import TokenCaptureStore
from token_id_capture.store.postgres.sql import SqlLimits, server_sql_reader
from token_id_capture.store.server_url import server_url

_CHANGING = re.compile(r"[0-9a-f]{32}|\b1[6-9]\d{8}(\.\d+)?\b|\d{4}-\d\d-\d\d[ T][0-9:.+-]+|\b\d+ (m?s|min) ago")


async def fill(store: TokenCaptureStore) -> None:
    """Rollouts in every state, with everything that a table holds."""
    await put_chain(store, "Zebra")  # a language would sort it behind the others
    await finish(store, "Zebra", "masked", "retry_unresolved")
    await put_chain(store, "delivered")
    snapshot = await store.freeze("delivered")
    metrics = {"n_calls": 3, "generated_tokens_captured": 12, "generated_tokens_delivered": 8, "causes": {"retry": 2}}
    await store.record_outcome(snapshot.snapshot_id, snapshot.version, "delivered", "", metrics)
    assert await store.drop("delivered", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    for late in (store.put(entry("delivered", "late", [1], [2])), store.begin_call("delivered", "later")):
        with pytest.raises(RuntimeError):
            await late
    origin = CallOrigin("main", None, Purpose.TURN, True, {"x-session": "s1"})
    await store.begin_attributed_call("open", "c0", origin)
    await store.put(entry("open", "c0", [1, 2], [3], agent="main", purpose=Purpose.TURN, offers_tools=True))
    await store.put(entry("open", "c1", [1, 2, 3, 4], [5], sampling={"stop": "\0%s"}))
    await store.begin_attributed_call("open", "lost", origin)
    await store.begin_call("open", "refused")
    await store.refuse_call("open", "refused", "HTTP 400: 100% of it")
    await store.mark_incomplete("open", "lost", "capture_failed: the engine said 'why?' :not a name")
    await put_chain(store, "frozen", turns=12)
    await store.freeze("frozen")


@pytest.fixture(scope="module")
def both(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A file and a server with the same content."""
    file = filled(tmp_path_factory.mktemp("file") / "captures.db", fill)

    async def fill_server(url: str) -> None:
        async with TokenCaptureStore(url) as store:
            await fill(store)

    with postgres.captures() as url:
        asyncio.run(fill_server(url))
        yield file, url


def alike(text: str) -> str:
    return _CHANGING.sub("*", text)


COMMANDS = {
    "ls": ["ls"],
    "ls-json": ["ls", "--json"],
    "ls-masked": ["ls", "--masked"],
    "ls-incomplete": ["ls", "--incomplete", "--limit", "1"],
    "ls-filtered": ["ls", "--state", "open", "--model", "", "--since", "1h", "--after", "delivered"],
    "show": ["show", "open", "--json"],
    "show-retired": ["show", "delivered", "--json"],
    "show-masked": ["show", "Zebra"],
    "explain": ["explain", "open", "--json"],
    "explain-masked": ["explain", "Zebra"],
    "export": ["export", "-o", "-", "--include-open"],
    "export-calls": ["export", "frozen", "-o", "-", "--per-request"],
    "verify": ["verify", "--json"],
    "prune": ["prune", "--older-than", "14d", "--dry-run"],
    "absent": ["show", "absent"],
    **{
        f"view-{view}": ["sql", f"SELECT * FROM {view} ORDER BY rollout_id, {order}", "--json"]
        for view, order in {
            "rollout_overview": "version",
            "kept_evidence": "version",
            "lost_calls": "model_call_id",
            "late_calls": "model_call_id",
            "call_chain": "stored",
            "call_tokens": "model_call_id, position",
        }.items()
    },
    "decoded": [
        "sql",
        "SELECT token_ids(generation) AS i, log_probs(log_probs) AS l FROM entries ORDER BY rollout_id, rowid",
        "--csv",
    ],
    "table": ["sql", "SELECT model_call_id, generation, finish_reason FROM entries WHERE rollout_id = 'open'"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_the_same_of_both(tokcap: RunTokcap, both: tuple[Path, str], command: str) -> None:
    of_file, of_server = (tokcap(*COMMANDS[command], "--database", database) for database in both)
    assert of_server.returncode == of_file.returncode
    found, expected = alike(of_server.stdout), alike(of_file.stdout)
    if command.startswith("view-"):
        numbers = ("pid", "host", "writer_id", "boot_id", "age_seconds", "stored_order", "seconds_after_freeze")
        found, expected = (
            json.dumps(
                [{name: value for name, value in row.items() if name not in numbers} for row in json.loads(text)]
            )
            for text in (found, expected)
        )
        columns = [list(json.loads(one.stdout)[0]) for one in (of_server, of_file)]
        assert columns[0] == columns[1]
    assert found == expected
    assert found or command == "absent"
    assert alike(of_server.stderr).replace(both[1].partition("?")[0], "*") == alike(of_file.stderr).replace(
        str(both[0]), "*"
    )


def test_a_page_of_all_and_of_one(tokcap: RunTokcap, both: tuple[Path, str], tmp_path: Path) -> None:
    for database in both:
        for arguments in (["--all"], ["Zebra"], ["open"]):
            page = tmp_path / "page.html"
            assert tokcap("report", *arguments, "-o", page, "--database", database).returncode == 0
            assert "<html" in page.read_text()


REFUSED = {
    "vacuum": "PostgreSQL frees space by itself",
    "backup copy.db": "pg_dump or pg_basebackup",
    "browse": "tokcap copy",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_for_files_alone_says_in_one_line_what_to_use(
    tokcap: RunTokcap, postgres_url: str, command: str
) -> None:
    refused = tokcap(*command.split(), "--database", postgres_url)
    assert refused.returncode == 2
    assert REFUSED[command] in one_line(refused.stderr)


def test_a_statement_may_neither_write_nor_take_its_time(tokcap: RunTokcap, both: tuple[Path, str]) -> None:
    url = both[1]
    refusals = {
        "DELETE FROM rollouts": "DELETE is refused",
        "COPY rollouts TO PROGRAM 'cat'": "COPY is refused",
        "WITH gone AS (DELETE FROM late_writes RETURNING 1) SELECT * FROM gone": "only statements that read are run",
        "SELECT nextval(pg_get_serial_sequence('entries', 'rowid'))": "only statements that read are run",
        "SELECT set_config('transaction_read_only', 'off', false)": "must be set before any query",
        "SELECT 1; DROP TABLE entries": "more than one statement",
        "SELECT $1": "has parameters",
        "SELECT * FROM nothing": 'relation "nothing" does not exist',
        " ": "no statement to run",
    }
    with server_sql_reader(server_url(url), SqlLimits(60.0), lambda: False) as reader:
        for statement, reason in refusals.items():
            with pytest.raises(StatementError, match=reason), reader.query(statement) as (_, pages):
                list(pages)
    slow = tokcap("sql", "SELECT pg_sleep(60)", "--timeout", "0.2", "--database", url)
    assert "took longer than 0.2 s: raise --timeout" in one_line(slow.stderr)
    assert "--role is for a server" in one_line(tokcap("sql", "SELECT 1", "--role", "x", "-d", both[0]).stderr)
    values = "SELECT 1, 2.5, 3::numeric, 'x', true, NULL, ARRAY[1,2], '\\x0102'::bytea"
    assert tokcap("sql", values, "--csv", "-d", url).stdout.splitlines()[1] == '1,2.5,3,x,True,,"[1,2]",0102'


def test_a_statement_runs_as_a_role_that_may_less(
    tokcap: RunTokcap, postgres: PostgresServer, both: tuple[Path, str]
) -> None:
    name = both[1].partition("?")[0].rpartition("/")[2]
    with postgres.admin(name) as admin:
        admin.execute("CREATE ROLE reader; GRANT SELECT ON rollouts TO reader")
        try:
            seen = tokcap("sql", "SELECT count(*) FROM rollouts", "--role", "reader", "--csv", "-d", both[1])
            assert seen.stdout.splitlines()[1] == "4"
            refused = tokcap("sql", "SELECT * FROM entries", "--role", "reader", "-d", both[1])
            assert "permission denied for table entries" in one_line(refused.stderr)
        finally:
            admin.execute("DROP OWNED BY reader; DROP ROLE reader")


def test_doctor_knows_which_process_lost_a_call(tokcap: RunTokcap, postgres: PostgresServer, postgres_url: str) -> None:
    body = f"store = TokenCaptureStore({postgres_url!r})\nawait store.begin_call('r', 'c')\nready()\n{WAITS_FOR_EVER}"
    with process(Path("unused"), body) as writer:
        alive = json.loads(tokcap("doctor", "--json", "--database", postgres_url).stdout)
        assert [call["fate"] for call in alive["open_calls"]] == ["in_flight"]
        assert alive["server"]["settings"]["synchronous_commit"] == "on"
        writer.kill()
        writer.wait()
    dead = tokcap("doctor", "--database", postgres_url)
    assert dead.returncode == 1
    assert f"process {writer.pid}" in dead.stdout
    with postgres.admin(postgres_url.partition("?")[0].rpartition("/")[2]) as admin:
        # The same process as another host would see it, at once and after a minute.
        for age, fate in ((0, "in_flight"), (61, "lost")):
            admin.execute(
                "UPDATE writers SET host = 'elsewhere', last_seen_at = extract(epoch FROM clock_timestamp()) - %s",
                [age],
            )
            seen = json.loads(tokcap("doctor", "--json", "--database", postgres_url).stdout)
            assert [call["fate"] for call in seen["open_calls"]] == [fate]


def test_rollouts_are_finalized_pruned_and_deleted(tokcap: RunTokcap, postgres_url: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with TokenCaptureStore(postgres_url) as store:
            await put_chain(store, "good")
            await put_chain(store, "bad")
            await store.mark_incomplete("bad", "c0", "capture_failed")

    asyncio.run(run())
    (tmp_path / "rollouts.jsonl").write_text('{"rollout_id": "good"}\n{"rollout_id": "bad"}\n')
    arguments = ["finalize", tmp_path / "rollouts.jsonl", "-o", tmp_path / "rows.jsonl", "--id-field", "rollout_id"]
    for _ in range(2):
        done = tokcap(*arguments, "--retire", "--database", postgres_url)
        assert done.returncode in (0, 1), done.stderr
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2
    states = {row["rollout_id"]: row["state"] for row in json.loads(tokcap("ls", "--json", "-d", postgres_url).stdout)}
    assert states == {"good": "retired", "bad": "frozen"}
    assert (
        "1 rollout of evidence" in tokcap("prune", "--older-than", "0s", "--evidence", "-y", "-d", postgres_url).stderr
    )
    tokcap("prune", "--older-than", "0s", "-y", "-d", postgres_url)
    gone = tokcap("delete", "good", "bad", "--yes", "--database", postgres_url)
    assert gone.returncode == 1
    assert json.loads(tokcap("ls", "--json", "-d", postgres_url).stdout) == []


def test_nothing_prints_the_password(tokcap: RunTokcap, postgres: PostgresServer, postgres_url: str) -> None:
    name = postgres_url.partition("?")[0].rpartition("/")[2]
    url = postgres.url(name, tcp=True)
    asyncio.run(_stored(url))
    printed = ""
    wrong = [url.replace(f"/{name}", "/absent"), url.replace("captures:", "nobody:"), f"{url}?nonsense=1"]
    wrong += [url.replace("captures:", f"captures:{first}") for first in ("wrong@", "12/", "12?", "%zz")]
    for command, database in [(["ls"], one) for one in wrong] + [(["doctor", "--json"], url), (["vacuum"], url)]:
        done = tokcap(*command, "--database", database)
        assert (done.returncode == 2) is (command != ["doctor", "--json"])
        printed += done.stdout + done.stderr
    assert "127.0.0.1" in printed
    assert PASSWORD not in printed
    with postgres.admin(name) as admin:
        assert PASSWORD not in str(admin.execute("SELECT * FROM writers").fetchall())


async def _stored(url: str) -> None:
    async with TokenCaptureStore(url) as store:
        await store.put(entry("r", "c", [1], [2]))
        assert PASSWORD not in f"{store.location} {store!r} {store.location!r}"
