"""``tokcap report``: the file that it writes, and how the drawings in it are laid out. What a browser
makes of it is tested in ``tests/browser``."""

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

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.commands import RunTokcap
from support.reported import HOSTILE, write_rollouts
from token_id_capture.explanation import call_tree
from token_id_capture.records import TokenEntry
from token_id_capture.report.charts import CHART_HEIGHT, MOST_SLOTS, cut, draw_bars
from token_id_capture.report.token_data import token_data
from token_id_capture.report.tree_drawing import draw_tree
from token_id_capture.store import TokenCaptureStore
from token_id_capture.tokens import TokenIds

VOID = {"meta", "link", "br", "img", "input"}


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
        self.text = ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.text += " "
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def report(tokcap: RunTokcap, database: Path, output: Path, *arguments: str) -> str:
    made = tokcap("report", *arguments, "-d", database, "-o", output)
    assert (made.returncode, made.stdout) == (0, ""), made.stderr
    assert made.stderr.startswith(f"tokcap: wrote {output}, ")
    return output.read_text("utf-8")


@pytest.mark.parametrize(
    ("rollout", "badge", "said"),
    [
        ("delivered", "delivered", "72 tokens, 18 of them sampled"),
        ("frozen", "deliverable", "nobody has recorded a outcome"),
        ("masked", "masked", "The call was begun and no tokens of it were ever stored"),
        ("open", "open", "It is open. Frozen now, it would be masked"),
        ("retired", "delivered", "What was captured of it was delivered, and then deleted here"),
        ("released", "released", "What was captured of it was deleted by an administrator"),
        ("nothing", "masked", "No calls are stored."),
    ],
)
def test_a_page_says_what_became_of_the_rollout(
    tokcap: RunTokcap, database: Path, tmp_path: Path, rollout: str, badge: str, said: str
) -> None:
    source = report(tokcap, database, tmp_path / "page.html", rollout)
    page = Page(source)
    assert f"<title>Rollout {rollout}: {badge}</title>" in source
    assert said in " ".join(page.text.split())


@pytest.mark.parametrize("rollout", ["masked", "open"])
def test_the_page_gives_the_advice_of_explain_and_each_once(
    tokcap: RunTokcap, database: Path, tmp_path: Path, rollout: str
) -> None:
    source = report(tokcap, database, tmp_path / "page.html", rollout)
    shown = re.findall(r'class="remedy"><strong>What to do:</strong> (.*?)</p>', source)
    told = tokcap("explain", rollout, "-d", database).stdout
    assert [html.unescape(advice) for advice in shown] == re.findall(r"What to do: (.*)", told)
    assert shown


@pytest.mark.parametrize("arguments", [["masked"], ["open"], ["--all"]])
def test_nothing_in_the_database_changes(
    tokcap: RunTokcap, database: Path, tmp_path: Path, arguments: list[str]
) -> None:
    def content() -> list[str]:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return list(connection.iterdump())

    before = content()
    report(tokcap, database, tmp_path / "page.html", *arguments)
    assert content() == before


@pytest.mark.parametrize("arguments", [["masked"], ["hostile"], ["retired"], ["--all"]])
def test_a_page_names_its_style_and_script_and_loads_nothing(
    tokcap: RunTokcap, database: Path, tmp_path: Path, arguments: list[str]
) -> None:
    source = report(tokcap, database, tmp_path / "page.html", *arguments)
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', source)[1])  # type: ignore[index]
    assert "default-src 'none'" in policy
    for tag in ("style", 'script type="module"'):
        for content in re.findall(rf"<{tag}>(.*?)</{tag.split()[0]}>", source, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"{tag.split()[0]}-src 'sha256-{digest}'" in policy
    for tag, attributes in Page(source).tags:
        assert tag not in ("link", "iframe", "img", "object")
        assert not attributes.get("src")
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")


def test_what_an_engine_sent_is_text_and_nothing_else(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    source = report(tokcap, database, tmp_path / "page.html", "hostile")
    page = Page(source)
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert page.text.count(shown) >= 3
    assert "\u202e" not in source
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert 'document.title="owned"' not in re.sub(r"&[#\w]+;", "", source)


def test_the_embedded_tokens_are_those_of_the_calls(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    source = report(tokcap, database, tmp_path / "page.html", "delivered")
    block = json.loads(re.search(r'id="token-data">(.*?)</script>', source)[1])  # type: ignore[index]
    exported = tmp_path / "rows.jsonl"
    tokcap("export", "-d", database, "-o", exported)
    row = next(row for row in map(json.loads, exported.read_text().splitlines()) if row["rollout_id"] == "delivered")
    assert array("I", base64.b64decode(block["ids"])).tolist() == row["token_ids"]
    sampled = [log_prob for log_prob, mask in zip(row["log_probs"], row["loss_mask"], strict=True) if mask]
    assert array("f", base64.b64decode(block["logProbs"])).tolist() == pytest.approx(sampled)
    assert block["calls"] == [[1, 34, 6, "call-001"], [2, 10, 6, "call-002"], [3, 10, 6, "call-003"]]
    assert block["sequences"] == [[0, 1, 2]]


def test_text_of_tokens_comes_with_a_tokenizer(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"<{number}>": number for number in range(151_936)}
    Tokenizer(WordLevel(words, unk_token="<0>")).save(str(tmp_path / "tokenizer.json"))
    source = report(
        tokcap, database, tmp_path / "page.html", "delivered", "--tokenizer", str(tmp_path / "tokenizer.json")
    )
    block = json.loads(re.search(r'id="token-data">(.*?)</script>', source)[1])  # type: ignore[index]
    assert block["texts"]["7919"] == "<7919>"


def test_the_overview_counts_outcomes_reasons_and_tokens(tokcap: RunTokcap, database: Path, tmp_path: Path) -> None:
    page = Page(report(tokcap, database, tmp_path / "page.html", "--all"))
    text = " ".join(page.text.split())
    assert "8 rollouts are known to this database: 1 open, 5 frozen, 2 retired." in text
    assert "2 were delivered and 3 masked or failed, most often for capture_incomplete (3)." in text
    assert "token_count_mismatch 1 in 1 rollout" in text
    assert "24 sampled tokens delivered of 66 captured" in text
    assert "36.4 % token yield" in text


def test_the_overview_of_an_empty_database_says_so(tokcap: RunTokcap, tmp_path: Path) -> None:
    async def create() -> Path:
        async with TokenCaptureStore(tmp_path / "captures.db") as store:
            return store.database

    database = asyncio.run(create())
    page = Page(report(tokcap, database, tmp_path / "page.html", "--all"))
    assert "No outcome was recorded yet." in page.text


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
    ],
)
def test_what_cannot_be_shown_is_one_line(
    tokcap: RunTokcap, database: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    refused = tokcap("report", *arguments, "-d", database, "-o", tmp_path / "page.html")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert said in refused.stderr
    assert os.listdir(tmp_path) == []


async def entries_of(path: Path, rollout_id: str) -> tuple[TokenEntry, ...]:
    async with TokenCaptureStore(path) as store:
        return await store.read_entries(rollout_id)


async def test_the_tree_has_a_column_a_turn_and_a_lane_a_sequence(database: Path) -> None:
    drawing = draw_tree(call_tree(await entries_of(database, "masked")), frozenset({"call-002"}))
    places = {node.number: (node.x, node.y) for node in drawing.nodes}
    first_lane = [places[number] for number in (1, 2, 4, 5)]
    assert [x for x, _ in first_lane] == sorted({x for x, _ in first_lane})
    assert len({y for _, y in first_lane}) == 1
    assert places[3][0] == places[4][0]
    assert len({places[number][1] for number in (1, 3, 6, 7)}) == 4
    assert len(set(places.values())) == len(places)
    assert [node.number for node in drawing.nodes if node.flagged] == [2]
    assert dict(drawing.roles).keys() == {"main", "branch", "retry", "empty"}


def test_a_tree_of_thousands_of_turns_is_drawn() -> None:
    history = TokenIds(range(10_000))
    calls = [
        TokenEntry(
            rollout_id="deep",
            model_call_id=f"{turn:05}",
            prompt_token_ids=history[: 2 * turn + 1],
            generation_token_ids=history[2 * turn + 1 : 2 * turn + 2],
            generation_log_probs=[-1.0],
        )
        for turn in range(4_000)
    ]
    drawing = draw_tree(call_tree(calls), frozenset())
    assert len({(node.x, node.y) for node in drawing.nodes}) == 4_000


async def test_sequences_beyond_the_budget_are_counted(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = call_tree(await entries_of(database, "masked"))
    whole = token_data(tree)
    assert whole is not None
    assert (len(whole.sequences), whole.left_out) == (3, 0)
    monkeypatch.setattr("token_id_capture.report.token_data.TOKEN_BUDGET", 1)
    small = token_data(tree)
    assert small is not None
    assert (small.sequences, small.left_out) == (whole.sequences[:1], 2)


@given(first=st.floats(0, 4e9), length=st.floats(0, 1e9))
def test_slots_hold_both_ends_and_are_not_too_many(first: float, length: float) -> None:
    slots = cut(first, first + length)
    assert 1 <= slots.number <= MOST_SLOTS
    assert slots.start <= first
    assert first + length < slots.start + slots.number * slots.width + 1e-6 * (1 + first)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=MOST_SLOTS))
def test_bars_stay_inside_their_plot(values: list[tuple[int, int]]) -> None:
    slots = cut(0.0, 60.0 * (len(values) - 1) + 1)
    stacks = [dict(zip(("delivered", "masked"), pair, strict=True)) for pair in values]
    stacks = (stacks * slots.number)[: slots.number]
    chart = draw_bars(slots, stacks, ["title"] * slots.number)
    for bar in chart.bars:
        assert bar.x >= 0
        assert bar.x + bar.width <= 100.01
        for segment in bar.segments:
            assert segment.height > 0
            assert -0.01 <= segment.y <= segment.y + segment.height <= CHART_HEIGHT + 4.01
