"""What a person sees of ``tokcap report``, and what a keyboard and a screen reader get of it."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from support.chromium import Watched, running_chromium
from support.reported import HOSTILE, LOG_PROBS, tokens, write_long_rollout, write_rollouts
from token_id_capture.cli.commands.report import report

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROLLOUTS = ("delivered", "masked", "open", "retired", "nothing", "hostile")
STRIP = "#strip"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each rollout, of one with 100,000 tokens, and of all."""
    directory = tmp_path_factory.mktemp("pages")
    asyncio.run(write_rollouts(directory / "captures.db"))
    asyncio.run(write_long_rollout(directory / "long.db"))
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
    """A page of 1200 x 900 pixels without a network; it must not complain of anything."""
    context = await browser.new_context(viewport={"width": 1200, "height": 900}, offline=True, color_scheme="light")
    page = Watched(await context.new_page())
    yield page
    await context.close()
    assert page.complaints == []


async def selected(page: Page) -> str:
    """What a screen reader is told of the selected token."""
    return await page.locator(STRIP).get_attribute("aria-valuetext") or ""


@pytest.mark.parametrize("name", [*ROLLOUTS, "all"])
async def test_every_page_opens_without_a_network_and_without_a_complaint(
    watched: Watched, pages: dict[str, Path], name: str
) -> None:
    await watched.open(pages[name])
    assert await watched.page.locator("h1").count() == 1
    assert await watched.page.locator("section h2").count() >= 2


async def test_the_strip_follows_the_arrow_keys(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["delivered"])
    page = watched.page
    await page.locator("#next-unlikely").focus()
    while await page.evaluate("document.activeElement.id") != "strip":
        await page.keyboard.press("Tab")
    first = tokens(0, 24)
    assert await selected(page) == f"token 1 of 72, id {first[0]}, context of call 1"
    await page.keyboard.press("ArrowRight")
    assert await selected(page) == f"token 2 of 72, id {first[1]}, context of call 1"
    await page.keyboard.press("End")
    chance = f"{100 * math.exp(LOG_PROBS[5]):.3g}"
    assert re.fullmatch(
        rf"token 72 of 72, id \d+, sampled by call 3, log probability {LOG_PROBS[5]:.4f}, probability {chance}0* %",
        await selected(page),
    )
    assert await page.locator(STRIP).get_attribute("aria-valuenow") == "72"
    await page.keyboard.press("Home")
    await page.keyboard.press("ArrowLeft")
    assert await page.locator(STRIP).get_attribute("aria-valuenow") == "1"


async def test_the_strip_is_as_high_as_its_rows_up_to_a_limit(watched: Watched, pages: dict[str, Path]) -> None:
    heights = {}
    for name in ("delivered", "long"):
        await watched.open(pages[name])
        await watched.page.wait_for_function("document.querySelector('#strip').clientHeight > 0")
        heights[name] = await watched.page.evaluate("document.querySelector('#strip').offsetHeight")
    assert heights["delivered"] < 60  # one row of 72 tokens
    assert heights["long"] == 308
    await watched.open(pages["delivered"])
    await watched.page.set_viewport_size({"width": 360, "height": 700})
    await watched.page.wait_for_function("document.querySelector('#strip').offsetHeight > 60")


async def test_keys_and_buttons_go_from_call_to_call_and_to_unlikely_tokens(
    watched: Watched, pages: dict[str, Path]
) -> None:
    await watched.open(pages["delivered"])
    page = watched.page
    await page.locator(STRIP).focus()
    await page.keyboard.press("Shift+ArrowRight")
    assert "token 41 of 72" in await selected(page)
    await page.get_by_role("button", name="Next call").click()
    assert "token 57 of 72" in await selected(page)
    await page.get_by_role("button", name="Previous call").click()
    assert "token 41 of 72" in await selected(page)
    await page.get_by_role("button", name="Next unlikely token").click()
    assert "token 56 of 72" in await selected(page)
    assert f"log probability {LOG_PROBS[5]:.4f}" in await selected(page)


async def test_a_token_tells_what_it_is_under_the_pointer(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["delivered"])
    page = watched.page
    await page.locator(STRIP).scroll_into_view_if_needed()
    box = await page.locator("#cells").bounding_box()
    assert box is not None
    # The first sampled token, number 35: cells are 10 pixels wide.
    await page.mouse.move(box["x"] + 8 + 34 * 10 + 3, box["y"] + 8 + 5)
    tip = await page.locator("#tip").inner_text()
    assert tip.splitlines() == [
        "token: 35 of 72",
        f"id: {tokens(501_000, 1)[0]}",
        "sampled by: call 1",
        "log probability: -0.0100",
        "probability: 99.0 %",
    ]
    await page.mouse.move(5, 5)
    assert await page.locator("#tip").is_hidden()


async def test_tokens_have_a_table_too(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["long"])
    page = watched.page
    await page.get_by_text("The same as a table").click()
    table = page.locator("#token-table")
    assert await table.locator("caption").inner_text() == "Tokens 1 to 100 of 100,024"
    await table.get_by_role("button", name="Next 100").click()
    assert await table.locator("caption").inner_text() == "Tokens 101 to 200 of 100,024"
    await page.locator(STRIP).focus()
    await page.keyboard.press("End")
    rows = await table.locator("tbody tr").all_inner_texts()
    last = [cell for cell in rows[-1].split("\t") if cell]
    assert last[0] == "100,024"
    assert last[2:] == ["100", "yes", f"{LOG_PROBS[5]:.4f}", "0.248 %"]


async def test_all_sequences_can_be_looked_at(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["masked"])
    page = watched.page
    options = await page.locator("#sequence option").all_inner_texts()
    assert [option.partition(":")[0] for option in options] == [
        *("Main sequence", "Answer that was left out", "Another sequence")
    ]
    await page.locator("#sequence").select_option(index=2)
    assert await page.locator(STRIP).get_attribute("aria-valuemax") == "104"
    # A call's number in the table leads to its tokens, in whichever sequence they are.
    await page.locator('a[data-call="3"]').click()
    assert await page.locator("#sequence").input_value() == "1"
    assert "sampled by call 3" in await selected(page)


async def test_the_tree_shows_each_call_and_leads_to_its_row(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["masked"])
    page = watched.page
    nodes = page.locator("svg.tree a")
    assert await nodes.count() == 7
    assert await page.locator("svg.tree .node.retry").count() == 1
    assert await page.locator("svg.tree .flagged").count() == 1
    await nodes.nth(5).click()
    assert page.url.endswith("#call-6")
    assert await page.locator("tr:target th").inner_text() == "6"


async def test_a_page_of_100000_tokens_opens_at_once_and_is_small(watched: Watched, pages: dict[str, Path]) -> None:
    assert pages["long"].stat().st_size < 1_000_000
    begun = time.perf_counter()
    await watched.open(pages["long"])
    page = watched.page
    await page.wait_for_function("document.querySelector('#strip').ariaValueMax === '100024'")
    # On an idle machine it takes about half a second; the limit leaves room for a busy one.
    assert time.perf_counter() - begun < 5
    await page.locator(STRIP).focus()
    await page.keyboard.press("End")
    await page.wait_for_function("document.querySelector('#strip').scrollTop > 20000")
    assert await page.evaluate(PAINTED, "#cells") > 100
    assert await page.evaluate(PAINTED, "#map") > 100


# Pixels are read from a copy: reading the page's own canvas again and again makes the browser complain.
COPY = """selector => {
  const canvas = document.querySelector(selector);
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return copy;
}"""

PAINTED = f"""selector => {{
  const context = ({COPY})(selector);
  const {{ data }} = context.getImageData(0, 0, context.canvas.width, context.canvas.height);
  let painted = 0;
  for (let i = 3; i < data.length; i += 4) painted += data[i] > 0;
  return painted;
}}"""

COLOUR = f"""([x, y]) => {{
  const {{ data }} = ({COPY})("#cells").getImageData(x, y, 1, 1);
  return [...data].slice(0, 3).join();
}}"""


async def test_colours_tell_context_likely_and_unlikely_tokens_apart(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["delivered"])
    page = watched.page
    await page.wait_for_function(f"({PAINTED})('#cells') > 100")
    seen = [await page.evaluate(COLOUR, [8 + 10 * (34 + step) + 3, 8 + 12]) for step in range(6)]
    context = await page.evaluate(COLOUR, [8 + 10 * 20 + 3, 8 + 12])
    assert len({*seen, context}) == 7


async def test_light_and_dark_follow_the_reader(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["delivered"])
    page = watched.page
    cell = [8 + 10 * 34 + 3, 8 + 12]
    await page.wait_for_function(f"({PAINTED})('#cells') > 100")
    light = await brightness(page), await page.evaluate(COLOUR, cell)
    await page.emulate_media(color_scheme="dark")
    await page.wait_for_function(f"before => ({COLOUR})({cell}) !== before", arg=light[1])
    dark = await brightness(page), await page.evaluate(COLOUR, cell)
    assert dark[0] < 60 < 200 < light[0]


async def brightness(page: Page) -> float:
    colour = await page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["masked", "all"])
async def test_text_stands_out_from_what_is_behind_it(
    watched: Watched, pages: dict[str, Path], name: str, scheme: str
) -> None:
    await watched.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    await watched.open(pages[name])
    weak = await watched.page.evaluate(WEAK_TEXT)
    assert weak == []


# Contrast of at least 4.5 to 1, as WCAG 2.2 asks for at level AA (success criterion 1.4.3).
WEAK_TEXT = """() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const weak = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest("svg, script")) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) weak.push(element.outerHTML.slice(0, 80));
  }
  return weak;
}"""


@pytest.mark.parametrize("name", ["masked", "hostile", "all"])
@pytest.mark.parametrize("width", [360, 1200])
async def test_no_page_is_wider_than_its_window(
    watched: Watched, pages: dict[str, Path], name: str, width: int
) -> None:
    await watched.page.set_viewport_size({"width": width, "height": 800})
    await watched.open(pages[name])
    assert await watched.page.evaluate("document.documentElement.scrollWidth") <= width


async def test_a_short_rollout_with_milliseconds_in_its_timeline_is_not_wider_either(
    watched: Watched, pages: dict[str, Path]
) -> None:
    await watched.page.set_viewport_size({"width": 360, "height": 800})
    await watched.open(pages["masked"])
    ticks = watched.page.locator(".ticks span")
    for number in range(await ticks.count()):
        await ticks.nth(number).evaluate("tick => { tick.textContent = '22:54:05.932'; }")
    assert await watched.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert [await ticks.nth(number).is_visible() for number in range(5)] == [True, False, True, False, True]


async def test_the_focus_can_be_seen(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["masked"])
    page = watched.page
    stops = set()
    for _ in range(60):
        await page.keyboard.press("Tab")
        stop, outline = await page.evaluate(
            "[document.activeElement.id || document.activeElement.tagName,"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        if stop == "BODY":
            break
        stops.add(stop)
        assert outline != "none", stop
    assert {"sequence", "previous-call", "next-call", "next-unlikely", "strip", "SUMMARY"} <= stops


async def test_a_screen_reader_finds_its_way(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["masked"])
    tree = await watched.page.locator("main").aria_snapshot()
    for expected in (
        'heading "masked masked" [level=1]',
        'heading "Why, and what to do" [level=2]',
        'region "Tokens"',
        'combobox "Sequence"',
        'slider "Tokens of the sequence"',
        'img "Tree of 7 calls: which call continues which. The table below says the same."',
        'region "Calls as a table"',
        'columnheader "mean log prob"',
        "calls recorded: 7",
        'heading "What is recorded" [level=2]',
    ):
        assert expected in tree, tree


async def test_text_of_an_engine_stays_text(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["hostile"])
    page = watched.page
    shown = HOSTILE.replace("\u202e", "\\u202e")
    assert shown in await page.locator(".said bdi").inner_text()
    assert shown in await page.locator("section[aria-labelledby=records]").inner_text()
    assert await page.title() == "Rollout hostile: masked"
    assert await page.locator("img:not(svg)").count() == 0
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


async def test_without_scripts_all_but_the_strip_is_there(browser: Browser, pages: dict[str, Path]) -> None:
    context = await browser.new_context(offline=True, java_script_enabled=False)
    page = await context.new_page()
    await page.goto(pages["masked"].as_uri())
    assert "The tokens are drawn by a script" in await page.locator("noscript").inner_text()
    assert await page.locator("svg.tree a").count() == 7
    assert await page.locator("table.calls tbody tr").count() == 7
    await context.close()


async def test_the_overview_shows_numbers_bars_and_a_table(watched: Watched, pages: dict[str, Path]) -> None:
    await watched.open(pages["all"])
    page = watched.page
    tiles = await page.locator(".tiles li").all_inner_texts()
    assert [tile.split("\n")[0] for tile in tiles] == ["2", "3", "1", "24", "36.4 %"]
    titles = await page.locator("section[aria-labelledby=outcomes] .bar title").all_text_contents()
    counts = [[int(number) for number in re.findall(r"(\d+) (?:delivered|masked|failed)", title)] for title in titles]
    assert [sum(column) for column in zip(*counts, strict=True)] == [2, 3, 0]
    drawn = await page.locator("section[aria-labelledby=outcomes] .bar rect:not(.hit)").count()
    assert drawn == sum(amount > 0 for row in counts for amount in row)
    assert await page.locator(".reasons code").all_inner_texts() == [
        *("capture_incomplete", "lost_stream", "no_token_ids", "token_count_mismatch")
    ]
    await page.get_by_text("Both as a table").click()
    assert await page.get_by_role("columnheader", name="yield").is_visible()
