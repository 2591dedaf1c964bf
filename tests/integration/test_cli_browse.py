"""``tokcap browse``: Datasette on a live database, asked over HTTP as a browser asks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import html
import json
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasette.app import Datasette
from datasette.database import QueryInterrupted

from support.commands import TOKCAP, RunTokcap, clean_environment
from support.reported import Rollout, tokens, write_rollouts
from token_id_capture.browse.queries import QUERIES, VIEWS
from token_id_capture.browse.site import CaptureDatabase
from token_id_capture.store import TokenCaptureStore

SECONDS = 60
KEYS: dict[str, str] = {}
"""The key of each running server, by its address."""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A question mark in a path must not be taken for the options of a database address.
    path = tmp_path_factory.mktemp("what?") / "captures.db"
    asyncio.run(write_rollouts(path))
    return path


def start(database: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The running command, and the address that it names."""
    process = subprocess.Popen(
        [TOKCAP, "browse", "-d", database, "--port", "0", *arguments],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"(http://\S+/captures)\?key=(\S+)", line)
    assert found, line
    KEYS[found[1].rpartition("/")[0]] = found[2]
    return process, found[1]


def stop(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def address(database: Path) -> Iterator[str]:
    process, url = start(database)
    yield url
    assert stop(process) == (0, "", "")


def cookie(url: str) -> str:
    key = KEYS["/".join(url.split("/")[:3])]
    return f"tokcap-browse-{hashlib.sha256(key.encode()).hexdigest()[:8]}={key}"


def get(url: str, **headers: str) -> str:
    request = urllib.request.Request(url, headers={"Cookie": cookie(url), **headers})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return str(response.read().decode())


def rows(url: str, **parameters: str) -> list[dict[str, Any]]:
    query = urllib.parse.urlencode({"_shape": "array", **parameters})
    found = json.loads(get(f"{url}.json?{query}"))
    assert isinstance(found, list), found
    return found


def refusal(url: str, **headers: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(url, **headers)
    with refused.value as response:
        return response.code, response.read().decode()


def test_the_first_page_offers_queries_and_views(address: str) -> None:
    page = get(address)
    for name, query in QUERIES.items():
        assert f"/captures/{name}" in page
        assert query["title"] in page
    for view in VIEWS:
        assert f"/captures/{view}" in page
    assert "alembic_version" not in page


@pytest.mark.parametrize("name", list(QUERIES))
def test_every_query_runs(address: str, name: str) -> None:
    found = rows(f"{address}/{name}", rollout="masked", call="call-002")
    assert found, name


@pytest.mark.parametrize("view", list(VIEWS))
def test_every_view_opens(address: str, view: str) -> None:
    page = get(f"{address}/{view}?_size=5")
    assert html.escape(VIEWS[view]) in page
    assert rows(f"{address}/{view}", _size="5")


def test_tokens_can_be_read_in_a_cell(address: str) -> None:
    page = get(f"{address}/entries?rollout_id=open")
    sampled = tokens(501_000, 6)
    assert f"6 tokens: {' '.join(map(str, sampled))}<" in page
    assert f"34 tokens: {' '.join(map(str, tokens(0, 12)))} …<" in page
    assert "6 log probabilities: -0.0100 -0.2000 -1.0000 -2.0000 -4.0000 -6.0000<" in page
    assert re.search(r'col-payload_digest type-bytes">[0-9a-f]{64}<', page)


def test_tokens_can_be_decoded_in_sql(address: str) -> None:
    decoded = "token_ids(generation) AS ids, log_probs(log_probs) AS chances"
    sql = f"SELECT {decoded} FROM entries WHERE rollout_id = 'open'"
    [row] = rows(address, sql=sql)
    assert json.loads(row["ids"]) == tokens(501_000, 6)
    assert json.loads(row["chances"])[:2] == [-0.01, -0.2]


def test_what_is_written_meanwhile_is_seen(address: str, database: Path) -> None:
    async def write() -> None:
        async with TokenCaptureStore(database) as store:
            await Rollout(store, "later").call()
            # Still in the write-ahead log, for the store is open.
            assert [row["calls"] for row in rows(f"{address}/rollout_overview", rollout_id="later")] == [1]

    asyncio.run(write())


def test_no_query_pins_the_log_longer_than_it_runs(address: str, database: Path) -> None:
    # Only the first thousand of a million rows are fetched.
    cut = json.loads(get(f"{address}.json?{urllib.parse.urlencode({'sql': 'SELECT a.n FROM numbers a, numbers b'})}"))
    assert cut["truncated"]
    with contextlib.closing(sqlite3.connect(database)) as connection:
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert busy == 0


async def test_a_page_does_not_wait_for_the_number_of_all_rows(database: Path) -> None:
    patient = Datasette([], settings={"sql_time_limit_ms": 600_000})
    shown = patient.add_database(CaptureDatabase(patient, path=str(database), is_mutable=True))
    with pytest.raises(QueryInterrupted):
        await shown.execute("select count(*) from numbers a, numbers b, numbers c")
    shown.close()


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM entries",
        "WITH one AS (SELECT 1) DELETE FROM entries",
        "WITH one AS (SELECT 1) INSERT INTO numbers SELECT 5000",
        "ATTACH 'other.db' AS other",
        "PRAGMA journal_mode = DELETE",
    ],
)
def test_nothing_can_be_written(address: str, sql: str) -> None:
    query = urllib.parse.urlencode({"sql": sql, "_shape": "array"})
    code, _ = refusal(f"{address}.json?{query}")
    assert code == 400
    assert rows(address, sql="SELECT count(*) AS calls FROM entries")[0]["calls"] > 5


def test_the_file_itself_is_not_handed_out(address: str) -> None:
    code, _ = refusal(f"{address}.db")
    assert code == 403


def test_a_page_of_another_site_cannot_ask_under_a_name_of_its_own(address: str) -> None:
    code, said = refusal(address, Host="captures.example:80")
    assert (code, said) == (421, "tokcap browse answers to 127.0.0.1 and localhost\n")
    assert "captures" in get(address, Host="localhost")


@pytest.mark.parametrize("path", ["", ".json", "/entries.csv"])
def test_without_the_key_nothing_is_shown(address: str, path: str) -> None:
    code, said = refusal(address + path, Cookie="none=1")
    assert (code, said) == (403, "Open the address that tokcap browse printed: it has the key in it.\n")
    assert refusal(f"{address}{path}?key=wrong", Cookie="none=1")[0] == 403


def test_the_address_that_is_printed_opens_the_pages_and_is_not_kept(address: str) -> None:
    key = KEYS[address.rpartition("/")[0]]
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    for url in (f"{address}?key={key}", address):
        with opener.open(url, timeout=SECONDS) as response:
            assert response.url == address
            assert "captures" in response.read().decode()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines"),
        (["--host", "nowhere.invalid"], "cannot listen on nowhere.invalid"),
    ],
)
def test_it_listens_on_loopback_only(tokcap: RunTokcap, database: Path, arguments: list[str], said: str) -> None:
    refused = tokcap("browse", "-d", database, *arguments)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert said in refused.stderr


def test_a_port_that_is_taken_is_one_line(tokcap: RunTokcap, database: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = tokcap("browse", "-d", database, "--port", taken.getsockname()[1])
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "(Address already in use): choose another --host or --port" in refused.stderr


def test_a_missing_database_is_one_line(tokcap: RunTokcap, tmp_path: Path) -> None:
    refused = tokcap("browse", "-d", tmp_path / "none.db")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "there is no capture database" in refused.stderr


def test_without_datasette_one_line_says_what_to_install(database: Path) -> None:
    program = (
        "import sys; sys.modules['datasette'] = None; "
        f"sys.argv = ['tokcap', 'browse', '-d', {str(database)!r}]; "
        "from token_id_capture.cli.main import main; main()"
    )
    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr) == (
        2,
        "tokcap: tokcap browse needs datasette: pip install 'token-id-capture[browse]'\n",
    )
