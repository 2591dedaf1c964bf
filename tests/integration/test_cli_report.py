"""``tokcap report``: the file that it writes, and the data in it. What a browser makes of it is tested in
``tests/browser``."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import html
import json
import os
import re
import sqlite3
from array import array
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from support.commands import RunTokcap
from support.reported import HOSTILE, write_rollouts
from token_id_capture.store import TokenCaptureStore

VOID = {"meta"}
ASSETS = Path(__file__).parents[2] / "src" / "token_id_capture" / "report" / "assets"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("database") / "captures.db"
    asyncio.run(write_rollouts(path))
    return path


class Page(HTMLParser):
    """Checks that tags are balanced, and collects text and attributes."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.content: dict[str, str] = {}
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.content[self.open[-1]] = self.content.get(self.open[-1], "") + data


def report(tokcap: RunTokcap, database: Path, output: Path, *arguments: object) -> str:
    made = tokcap("report", *arguments, "-d", database, "-o", output)
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    assert made.stderr.startswith(f"tokcap: wrote {output}, ")
    return output.read_text("utf-8")


def embedded(source: str) -> dict[str, Any]:
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', source)
    assert block
    data: dict[str, Any] = json.loads(block[1])
    return data


@pytest.mark.parametrize(
    ("rollout", "badge", "said"),
    [
        ("delivered", "delivered", "72 tokens, 18 of them sampled"),
        ("frozen", "deliverable", "nobody has recorded an outcome"),
        ("open", "open", "It is open. Frozen now, it would be masked"),
        ("retired", "delivered", "Its capture was delivered, and then deleted here"),
        ("released", "released", "Its capture was deleted by an administrator"),
        ("nothing", "masked", "No calls are stored."),
    ],
)
def test_a_page_says_what_became_of_the_rollout(
    tokcap: RunTokcap, database: Path, tmp_path: Path, rollout: str, badge: str, said: str
) -> None:
    source = report(tokcap, database, tmp_path / "page.html", rollout)
    data = embedded(source)["rollout"]
    assert f"<title>Rollout {rollout}: {badge}</title>" in source
    assert said in f"{data['headline']} {data['summary']}"


def test_the_page_gives_the_advice_of_explain_and_each_once(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    findings = embedded(report(tokcap, database, tmp_path / "page.html", "masked"))["rollout"]["findings"]
    told = tokcap("explain", "masked", "-d", database).stdout
    shown = [remedy for finding in findings for remedy in finding["remedies"]]
    assert shown == re.findall(r"What to do: (.*)", told)
    assert shown


@pytest.mark.parametrize("arguments", [["masked"], ["--all"]])
def test_nothing_in_the_database_changes(
    tokcap: RunTokcap, database: Path, tmp_path: Path, arguments: list[str]
) -> None:
    def content() -> list[str]:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return list(connection.iterdump())

    before = content()
    report(tokcap, database, tmp_path / "page.html", *arguments)
    assert content() == before


@pytest.mark.parametrize("arguments", [["hostile"], ["--all"]])
def test_a_page_names_its_style_and_script_and_loads_nothing(
    tokcap: RunTokcap, database: Path, tmp_path: Path, arguments: list[str]
) -> None:
    source = report(tokcap, database, tmp_path / "page.html", *arguments)
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', source)[1])  # type: ignore[index]
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    for tag in ("style", 'script type="module"'):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", source, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag.split()[0]}-src 'sha256-{digest}'" in policy
    for tag, attributes in Page(source).tags:
        assert tag in ("html", "head", "meta", "title", "style", "body", "noscript", "script")
        assert not any(name.startswith("on") or name in ("src", "href", "style") for name in attributes)


def test_scripts_make_elements_and_never_markup() -> None:
    scripts = "".join(path.read_text("utf-8") for path in sorted(ASSETS.glob("*.js")))
    assert "textContent" in scripts
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "http://"):
        found = scripts.replace("http://www.w3.org/2000/svg", "").count(way)
        assert found == 0, way


def test_what_an_engine_sent_is_data_and_nothing_else(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    source = report(tokcap, database, tmp_path / "page.html", "hostile")
    assert [tag for tag, _ in Page(source).tags].count("script") == 2
    data = embedded(source)["rollout"]
    assert data["calls"][0]["said"][0]["text"] == HOSTILE
    assert data["flags"][0]["model_call_id"] == HOSTILE


def test_the_embedded_tokens_are_those_of_the_calls(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    data = embedded(report(tokcap, database, tmp_path / "page.html", "delivered"))["rollout"]
    exported = tmp_path / "rows.jsonl"
    tokcap("export", "-d", database, "-o", exported)
    row = next(row for row in map(json.loads, exported.read_text().splitlines()) if row["rollout_id"] == "delivered")
    assert array("I", base64.b64decode(data["tokens"]["ids"])).tolist() == row["token_ids"]
    sampled = [log_prob for log_prob, mask in zip(row["log_probs"], row["loss_mask"], strict=True) if mask]
    assert array("f", base64.b64decode(data["tokens"]["log_probs"])).tolist() == pytest.approx(sampled)
    assert [call["steps"] for call in data["calls"]] == [[[0, 0, 34]], [[0, 40, 10]], [[0, 56, 10]]]
    assert data["sequences"][0]["calls"] == [1, 2, 3]
    assert all(call["begun_at"] <= call["stored_at"] for call in data["calls"])


def test_a_history_that_diverges_is_told_by_what_differs(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    calls = embedded(report(tokcap, database, tmp_path / "page.html", "masked"))["rollout"]["calls"]
    edited = calls[5]
    assert (edited["parent"], edited["base"]) == (None, 5)
    # One token was changed, and the prompt goes on behind the earlier sequence.
    assert edited["steps"] == [[0, 30, 1], [31, 57, 10]]
    assert (edited["divergence"]["position"], edited["divergence"]["cause"]) == (30, "sub_agent")


def test_text_of_tokens_comes_with_a_tokenizer(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"<{number}>": number for number in range(151_936)}
    Tokenizer(WordLevel(words, unk_token="<0>")).save(str(tmp_path / "tokenizer.json"))
    source = report(tokcap, database, tmp_path / "page.html", "delivered", "--tokenizer", tmp_path / "tokenizer.json")
    assert embedded(source)["rollout"]["tokens"]["texts"]["7919"] == " <7919>"


def test_the_overview_counts_outcomes_reasons_and_tokens(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text('{"_ng_rollout_id": "delivered", "reward": 1}\n{"_ng_rollout_id": "masked", "reward": 0.5}\n')
    data = embedded(report(tokcap, database, tmp_path / "page.html", "--all", "--records", records))
    overview = data["overview"]
    assert "8 rollouts are known to this database: 1 open, 5 frozen, 2 retired." in overview["summary"]
    assert "2 were delivered and 3 masked or failed, most often for capture_incomplete (3)." in overview["summary"]
    assert [tile["value"] for tile in overview["tiles"]] == ["2", "3", "1", "24", "36.4 %", "0.75"]
    counted = {
        (plot["title"], series["name"]): sum(series["values"])
        for plot in overview["plots"]
        for series in plot["series"]
    }
    assert counted["Rollouts by outcome", "delivered"] == 2
    assert counted["Why sequences began anew", "sub_agent"] == 1
    assert counted["Yield of sampled tokens", "captured, not delivered"] == 66 - 24
    assert counted["Calls of a rollout", "masked"] == 3
    assert counted["Reward by outcome", "delivered"] == counted["Reward by outcome", "masked"] == 1
    assert {line["id"]: line["reward"] for line in data["rollouts"]} == {
        **dict.fromkeys(["frozen", "released", "retired", "open", "nothing", "hostile"]),
        "delivered": 1.0,
        "masked": 0.5,
    }


def test_the_overview_of_an_empty_database_says_so(tokcap: RunTokcap, tmp_path: Path) -> None:
    async def create() -> Path:
        async with TokenCaptureStore(tmp_path / "captures.db") as store:
            return store.database

    source = report(tokcap, asyncio.run(create()), tmp_path / "page.html", "--all")
    assert "No outcome was recorded yet." in embedded(source)["overview"]["summary"]


def test_an_earlier_report_is_replaced_and_nothing_else(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    report(tokcap, database, tmp_path / "page.html", "open")
    assert "Rollout masked" in report(tokcap, database, tmp_path / "page.html", "masked")
    (tmp_path / "notes.html").write_text("<!doctype html>\nmine")
    refused = tokcap("report", "open", "-d", database, "-o", tmp_path / "notes.html")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "is not replaced" in refused.stderr
    assert (tmp_path / "notes.html").read_text() == "<!doctype html>\nmine"
    assert sorted(os.listdir(tmp_path)) == ["notes.html", "page.html"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name one rollout, or say --all"),
        (["open", "--all"], "name one rollout, or say --all"),
        (["nobody"], "no rollout 'nobody' is in this database"),
        (["../etc"], "invalid rollout id"),
        (["open", "--tokenizer", "none.json"], "cannot read none.json as a tokenizer.json"),
        (["--all", "--records", "none.jsonl"], "cannot read records of none.jsonl: No such file"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    tokcap: RunTokcap, database: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    refused = tokcap("report", *arguments, "-d", database, "-o", tmp_path / "page.html")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert said in refused.stderr
    assert os.listdir(tmp_path) == []
