"""What a person sees of ``tokcap report``, and what a keyboard and a screen reader get of it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from support.chromium import WEAK_TEXT, Watched, running_chromium
from support.reported import HOSTILE, LOG_PROBS, tokens, write_long_rollout, write_rollouts
from token_id_capture.cli.commands.report import report

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
ROLLOUTS = ("delivered", "masked", "open", "retired", "nothing", "hostile")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each rollout, of one with 200 calls and 200,000 tokens, and of all."""
    directory = tmp_path_factory.mktemp("pages")
    asyncio.run(write_rollouts(directory / "captures.db"))
    asyncio.run(write_long_rollout(directory / "long.db", 200))
    made = {name: directory / f"{name}.html" for name in (*ROLLOUTS, "long", "all")}
    for name in ROLLOUTS:
        report(str(directory / "captures.db"), made[name], name)
    report(str(directory / "captures.db"), made["all"], every=True)
    report(str(directory / "long.db"), made["long"], "long")
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_chromium() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def watched(browser: Browser) -> AsyncIterator[Watched]:
    """A page of 1400 x 900 pixels without a network; it must not complain of anything."""
    context = await browser.new_context(viewport={"width": 1400, "height": 900}, offline=True, color_scheme="light")
    page = Watched(await context.new_page())
    yield page
    await context.close()
    assert page.complaints == []


async def facts(page: Page) -> dict[str, str]:
    """What the inspector says of the selected token."""
    pairs = page.locator(".inspector section", has_text="Token").first.locator("dl > div")
    return dict([(await pairs.nth(i).inner_text()).split("\n", 1) for i in range(await pairs.count())])


async def test_every_page_opens_without_a_network_and_without_a_complaint(
    watched: Watched, pages: dict[str, Path]
) -> None:
    for name in (*ROLLOUTS, "all"):
        await watched.open(pages[name])
        assert await watched.page.locator("h1:visible").count() == 1, name
        assert await watched.page.evaluate("document.documentElement.scrollWidth") <= 1400, name


async def test_a_call_shows_what_it_adds_and_leads_to_the_others(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["delivered"])
    page = watched.page
    assert await page.locator("article.call").count() == 3
    last = page.locator("#call-3")
    shown = await last.locator(".text.prompt").inner_text()
    assert shown.split() == [str(token) for token in tokens(3_000, 10)]
    await last.get_by_role("link", name="call 2").click()
    assert await page.evaluate("document.activeElement.id") == "call-2"
    assert await page.locator(".outline .row.chosen b").inner_text() == "2"
    await page.locator('.outline .row[data-call="1"]').click()
    assert await page.evaluate("document.activeElement.id") == "call-1"
    assert page.url.endswith("#delivered/1")


async def test_keys_go_from_call_to_call_and_to_unlikely_tokens(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["delivered"])
    page = watched.page
    await page.keyboard.press("n")
    told = await facts(page)
    assert (told["token"], told["sampled by"]) == ("40 of 40", "call 1")
    assert (told["log probability"], told["probability"]) == (f"{LOG_PROBS[5]:.4f}", "0.248 %")
    await page.keyboard.press("ArrowLeft")
    assert (await facts(page))["token"] == "39 of 40"
    await page.keyboard.press("n")
    await page.keyboard.press("n")
    assert (await facts(page))["token"] == "56 of 56"
    await page.keyboard.press("j")
    assert await page.evaluate("document.activeElement.id") == "call-2"
    await page.keyboard.press("k")
    assert await page.evaluate("document.activeElement.id") == "call-1"


async def test_each_probability_has_a_colour_and_a_token_tells_what_it_is(
    watched: Watched, pages: dict[str, Path]
) -> None:
    await watched.open(pages["delivered"])
    page = watched.page
    sampled = page.locator("#call-1 .text.answer span")
    colours = [await sampled.nth(i).evaluate("node => getComputedStyle(node).backgroundColor") for i in range(6)]
    assert len(set(colours)) == 6
    await sampled.nth(0).hover()
    tip = (await page.locator("#tip").inner_text()).split("\n")
    assert tip[0] == "token: 35 of 40"
    assert tip[-1] == "probability: 99.0 %"


async def test_a_divergence_shows_both_sides(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["masked"])
    page = watched.page
    await page.get_by_role("button", name="divergence").click()
    card = page.locator("#call-6 .diff")
    title = " ".join((await card.locator("h4").inner_text()).split())
    assert title == "Diverges from call 5 at token 31 of 88 sub agent"
    old, new = await card.locator("del").inner_text(), await card.locator("ins").inner_text()
    assert int(new) == int(old) + 1
    # What both have in common is one line until it is asked for.
    shared = page.locator("#call-6 details.shared").first
    await shared.locator("summary").click(position={"x": 4, "y": 6})
    assert len((await shared.locator(".text").first.inner_text()).split()) == 30


async def test_the_outline_is_the_tree_and_has_calls_that_were_lost(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["masked"])
    page = watched.page
    assert await page.locator(".outline .row").count() == 8
    assert await page.locator(".outline .node.retry").count() == 1
    assert await page.locator(".outline .flagged").count() == 1
    assert await page.locator(".outline .row.lost").count() == 1
    lanes = await page.locator(".outline .node").evaluate_all("nodes => nodes.map(node => node.getAttribute('cx'))")
    assert lanes[0] == lanes[1] == lanes[3] == lanes[4] != lanes[2]
    sequences = await page.get_by_label("Calls that are shown").locator("option").all_inner_texts()
    assert [name.partition(":")[0] for name in sequences[1:]] == [
        *("Main sequence", "Answer that was left out", "Another sequence")
    ]
    await page.get_by_label("Calls that are shown").select_option(index=3)
    assert await page.locator("article.call").count() == 1


async def test_200000_tokens_open_in_two_seconds_scroll_and_are_searched(
    watched: Watched, pages: dict[str, Path]
) -> None:
    assert pages["long"].stat().st_size < 3_000_000
    page = watched.page
    began = time.perf_counter()
    await watched.open(pages["long"])
    await page.locator("article.call .text span").first.wait_for()
    # Half a second on an idle machine; twice the promise leaves room for a busy one.
    assert time.perf_counter() - began < 4
    await page.keyboard.press("End")
    await page.locator("#call-200 .text.answer span").first.wait_for()
    drawn = await page.evaluate("document.querySelectorAll('.text span').length")
    assert 0 < drawn < 20_000
    wanted = str(tokens(500_000 + 1000 * 77, 300)[150])
    await page.keyboard.press("/")
    await page.keyboard.type(wanted)
    await page.keyboard.press("Enter")
    await page.locator("#call-77 .text.answer .hit.selected").wait_for()
    assert await page.locator("#call-77 .text.answer .hit.selected").inner_text() == f"{wanted} "
    assert await page.locator("output").inner_text() in ("1 of 2", "2 of 2")


async def test_text_stands_out_from_what_is_behind_it_in_light_and_dark(
    watched: Watched, pages: dict[str, Path]
) -> None:
    brightness = []
    for name in ("masked", "all"):
        await watched.open(pages[name])
        for scheme in SCHEMES:
            await watched.page.emulate_media(color_scheme=scheme)
            assert await watched.page.evaluate(WEAK_TEXT) == [], (name, scheme)
            shade = await watched.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            brightness.append(sum(map(int, re.findall(r"\d+", shade)[:3])) / 3)
    assert max(brightness[1::2]) < 60 < 200 < min(brightness[::2])


async def test_a_narrow_window_is_not_left(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.page.set_viewport_size({"width": 380, "height": 800})
    for name in ("masked", "hostile", "all"):
        await watched.open(pages[name])
        assert await watched.page.evaluate("document.documentElement.scrollWidth") <= 380


async def test_a_screen_reader_finds_its_way(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["masked"])
    tree = await watched.page.locator("main").aria_snapshot()
    for expected in (
        'heading "masked masked" [level=1]',
        'searchbox "Search in this rollout"',
        'region "Conversation"',
        'article "Call 1"',
        'heading "capture incomplete" [level=3]',
        'listbox "Calls: which continues which, and when"',
        'region "Where call 6 diverges from call 5"',
    ):
        assert expected in tree, tree


async def test_text_of_an_engine_stays_text(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["hostile"])
    page = watched.page
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert shown in await page.locator("#call-1 .prose").inner_text()
    await page.get_by_text("What is recorded").click()
    assert shown in await page.locator(".records").inner_text()
    assert await page.title() == "Rollout hostile: masked"
    assert await page.locator("img").count() == 0
    assert await page.locator("script").count() == 2


async def test_the_policy_stops_a_script_that_is_not_the_pages_own(browser: Browser, pages: dict[str, Path]) -> None:
    context = await browser.new_context(offline=True)
    page = await context.new_page()
    await page.goto(pages["masked"].as_uri())
    foreign = "document.body.append(Object.assign(document.createElement('script'), {text: 'owned = 1'}))"
    async with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        await page.evaluate(foreign)
    assert await page.evaluate("typeof owned") == "undefined"
    await context.close()


async def test_the_overview_shows_numbers_bars_and_rollouts(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["all"])
    page = watched.page
    tiles = await page.locator(".tiles li").all_inner_texts()
    assert [tile.split("\n")[0] for tile in tiles] == ["2", "3", "1", "24", "36.4 %"]
    assert await page.locator("figure").count() == 5
    titles = await page.locator("figure").first.locator("g title").all_text_contents()
    counts = [int(number) for title in titles for number in re.findall(r"(?:delivered|masked) (\d+)", title)]
    assert sum(counts) == 5
    assert await page.locator(".list .row").count() == 8
    await page.get_by_label("state").select_option("open")
    assert await page.locator(".list .row b").all_inner_texts() == ["open"]
